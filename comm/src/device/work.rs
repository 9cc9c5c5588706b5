//! The work of an operation on devices, whichever it is: each member packs its elements; then members read each other's memory, or NCCL
//! carries the elements; and each member's sum goes into its output.

use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::Fold;
use hsdp_kernels::cuda::{CudaError, DeviceBuffer};
use hsdp_sharding::{DType, balanced};

use super::member::{DeviceOutput, Input, Member};
use crate::execute::{LAYOUTS_DIFFER, Meter, Outputs, Work};
use crate::nccl::{Carrier, Transfer};
use crate::sync::Mutex;
use crate::{Error, Op};

/// Elements that a kernel takes at once: where ranges of its operands begin.
const WIDTH: usize = 4;

/// An operation, to be issued on the streams of its members.
pub(crate) struct Issue {
    op: Op,
    /// By slot. A member is packed under its lock.
    members: Vec<Mutex<Member>>,
    /// Of all members, if they go by NCCL.
    carriers: Vec<Carrier>,
}

impl Issue {
    /// # Errors
    /// If the members do not have the same layout or length, or only some go by NCCL.
    pub(super) fn new(members: Vec<Member>) -> Result<Self, String> {
        let first = &members[0];
        if members.iter().any(|member| member.layout() != first.layout()) {
            return Err(LAYOUTS_DIFFER.to_owned());
        }
        let (op, len) = (first.op(), first.output.len());
        if let Some(other) = members.iter().find(|member| member.output.len() != len) {
            return Err(format!("member 0 brings {len} elements, another {}", other.output.len()));
        }
        let carriers: Vec<_> = members.iter().filter_map(|it| it.caller.carrier.clone()).collect();
        if ![0, members.len()].contains(&carriers.len()) {
            return Err(format!("{} of {} ranks go by NCCL", carriers.len(), members.len()));
        }
        Ok(Self { op, members: members.into_iter().map(Mutex::new).collect(), carriers })
    }
}

impl Work for Issue {
    type Gets = DeviceOutput;

    fn blocks(&self) -> usize {
        if self.op == Op::AllGather { 0 } else { self.members.len() }
    }

    /// The host moves nothing.
    fn bytes(&self) -> usize {
        0
    }

    /// Gradients on the host are lent by code of users.
    fn calls_users(&self) -> bool {
        self.op == Op::ReduceScatter
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        let member = &mut *self.members[block].lock();
        meter.lent_by(block, || member.pack());
    }

    /// All members get their outputs, or all the first error: a part that failed is one that others were to read.
    fn finish(self) -> Outputs<DeviceOutput> {
        let mut members: Vec<_> = self.members.into_iter().map(Mutex::into_inner).collect();
        let issued = issue(&mut members, &self.carriers);
        let output = |member: Member| DeviceOutput(issued.clone().map(|()| member.into_output()));
        members.into_iter().map(output).collect()
    }
}

fn issue(members: &mut [Member], carriers: &[Carrier]) -> Result<(), Error> {
    let packed = members.iter_mut().map(|member| {
        let packed = member.packed.take().transpose();
        packed.map_err(|error| member.failed(error))
    });
    let wires: Vec<_> = packed.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    match members[0].op() {
        Op::AllGather if carriers.is_empty() => each(members, place_all(members)),
        Op::AllGather => gather_by_nccl(members, carriers),
        Op::ReduceScatter if carriers.is_empty() => sum_shards(members, &wires),
        _ if carriers.is_empty() => sum_owned(members, &wires),
        op => sum_by_nccl(members, (op, carriers), wires),
    }
}

/// Has each member do its part.
fn each(
    members: &mut [Member],
    mut part: impl FnMut(usize, &mut Member) -> Result<(), CudaError>,
) -> Result<(), Error> {
    members
        .iter_mut()
        .enumerate()
        .try_for_each(|(slot, member)| part(slot, member).map_err(|error| member.failed(error)))
}

/// Copies both regions of all shards to where they lie in the whole.
fn place_all(
    members: &[Member],
) -> impl FnMut(usize, &mut Member) -> Result<(), CudaError> + use<> {
    let gathered = members.iter().filter_map(|member| match &member.input {
        Input::Gather { layout, shard } => Some((Arc::clone(layout), Arc::clone(shard))),
        _ => None,
    });
    let gathered: Vec<_> = gathered.collect();
    move |_, member| {
        for (index, (layout, shard)) in gathered.iter().enumerate() {
            let mut from = 0;
            for region in [layout.trainable(), layout.frozen()] {
                let (to, len) = (region.start + index * region.shard_len, region.shard_len);
                if len > 0 {
                    let part = (&**shard, from..from + len);
                    member.output.copy(&member.caller.stream, to..to + len, part)?;
                }
                from += len;
            }
        }
        Ok(())
    }
}

/// Both regions, each from where it lies in the shards to where it lies in the whole.
fn gather_by_nccl(members: &mut [Member], carriers: &[Carrier]) -> Result<(), Error> {
    let Some(layout) = members[0].layout().cloned() else { return Ok(()) };
    let mut from = 0;
    for region in [layout.trainable(), layout.frozen()] {
        let own = from..from + region.shard_len;
        from = own.end;
        if region.len == 0 {
            continue;
        }
        let part = |member| gathered(member, (own.clone(), region.range()));
        Carrier::carry(carriers, Op::AllGather, members.iter_mut().filter_map(part).collect())?;
    }
    Ok(())
}

/// A member's part of a gather: from a range of its shard to one of the whole.
fn gathered(member: &mut Member, (own, to): (Range<usize>, Range<usize>)) -> Option<Transfer<'_>> {
    let Input::Gather { shard, .. } = &member.input else { return None };
    Some(Transfer { from: Some((&**shard, own)), to: (&mut member.output, to) })
}

/// Each member sums its shard of what all have packed.
fn sum_shards(members: &mut [Member], wires: &[DeviceBuffer]) -> Result<(), Error> {
    let wires: Vec<&DeviceBuffer> = wires.iter().collect();
    each(members, |slot, member| {
        let len = member.output.len();
        member.sum(&wires, slot * len..(slot + 1) * len)
    })
}

/// Each member sums the slice that it owns of the packed elements, and copies it to all.
fn sum_owned(members: &mut [Member], wires: &[DeviceBuffer]) -> Result<(), Error> {
    let wires: Vec<&DeviceBuffer> = wires.iter().collect();
    for owner in 0..members.len() {
        let summed = sum_of_owner(members, owner, &wires);
        summed.map_err(|error| members[owner].failed(error))?;
    }
    Ok(())
}

fn sum_of_owner(
    members: &mut [Member],
    owner: usize,
    wires: &[&DeviceBuffer],
) -> Result<(), CudaError> {
    let Input::AllReduce(scaling) = members[owner].input else { return Ok(()) };
    let owned = balanced(members[owner].output.len(), members.len(), owner);
    if owned.is_empty() {
        return Ok(());
    }
    // The kernel begins where its vectors do, a little before what is owned: that is summed, and not copied.
    let begin = owned.start / WIDTH * WIDTH;
    let summed = begin..owned.end;
    let mut sums = members[owner].room(DType::F32, summed.len(), "sums of partials")?;
    let stream = Arc::clone(&members[owner].caller.stream);
    stream.sum(&mut sums, (wires, summed), (scaling.post, Fold::Replace), None)?;
    members.iter_mut().try_for_each(|member| {
        let from = owned.start - begin..owned.end - begin;
        member.output.copy(&stream, owned.clone(), (&sums, from))
    })
}

/// NCCL sums what members have packed, in the dtype of the wire; what each gets of it goes into its output.
fn sum_by_nccl(
    members: &mut [Member],
    (op, carriers): (Op, &[Carrier]),
    mut wires: Vec<DeviceBuffer>,
) -> Result<(), Error> {
    let mut shards = Vec::new();
    if op == Op::ReduceScatter {
        for (member, wire) in members.iter().zip(&wires) {
            let shard = member.room(wire.dtype(), member.output.len(), "a sum on the wire");
            shards.push(shard.map_err(|error| member.failed(error))?);
        }
        let pairs = wires.iter().zip(&mut shards);
        let transfers = pairs.map(|(wire, shard)| Transfer::whole(Some(wire), shard));
        Carrier::carry(carriers, op, transfers.collect())?;
    } else {
        let in_place = wires.iter_mut().map(|wire| Transfer::whole(None, wire));
        Carrier::carry(carriers, op, in_place.collect())?;
    }
    let sums = if op == Op::ReduceScatter { &shards } else { &wires };
    each(members, |slot, member| member.sum(&[&sums[slot]], 0..sums[slot].len()))
}
