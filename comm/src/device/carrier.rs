//! Who carries what travels between members: this process itself, or NCCL.

use std::ops::Range;
#[cfg(feature = "nccl")]
use std::sync::Arc;

use hsdp_kernels::cuda::DeviceBuffer;

use super::outcome::Part;
use crate::Error;
#[cfg(feature = "nccl")]
use crate::Op;
#[cfg(feature = "nccl")]
use crate::nccl::{NcclError, NotIssued, issue_together};

/// Some elements of a buffer.
pub(super) type Elements<'a> = (&'a DeviceBuffer, Range<usize>);

/// Whether all members go by NCCL; an error if only some do.
pub(super) fn goes_by_nccl(parts: &[Part]) -> Result<bool, String> {
    let members = parts.iter().filter(|part| part.goes_by_nccl()).count();
    match members {
        0 => Ok(false),
        all if all == parts.len() => Ok(true),
        some => Err(format!("{some} of {} ranks go by NCCL", parts.len())),
    }
}

#[cfg(not(feature = "nccl"))]
impl Part {
    pub(super) fn goes_by_nccl(&self) -> bool {
        false
    }
}

#[cfg(feature = "nccl")]
impl Part {
    pub(super) fn goes_by_nccl(&self) -> bool {
        self.nccl.is_some()
    }

    fn refused(&self, op: Op, error: NcclError) -> Error {
        match error {
            NcclError::Device(error) => self.failed(op, error),
            error => {
                let (rank, step, error) = (self.rank, self.step, Arc::new(error));
                Error::Nccl { op, rank, step, error }
            }
        }
    }
}

/// Every member's part becomes a range of everybody's whole.
#[cfg(feature = "nccl")]
pub(super) fn all_gather(
    parts: &[Part],
    shards: &[Elements<'_>],
    (wholes, range): (&mut [DeviceBuffer], Range<usize>),
) -> Result<(), Error> {
    let op = Op::AllGather;
    let mut held = locked(parts);
    let mut calls = Vec::with_capacity(parts.len());
    for (((part, comm), shard), whole) in parts.iter().zip(&mut held).zip(shards).zip(wholes) {
        let call = comm.gathering(&part.stream, shard.clone(), (whole, range.clone()));
        calls.push(call.map_err(|error| part.refused(op, error))?);
    }
    let issued = issue_together(calls);
    settled(parts, held, issued, op)
}

/// Every member gets the sum of its part of what all have.
#[cfg(feature = "nccl")]
pub(super) fn reduce_scatter(
    parts: &[Part],
    wires: &[DeviceBuffer],
    sums: &mut [DeviceBuffer],
) -> Result<(), Error> {
    let op = Op::ReduceScatter;
    let mut held = locked(parts);
    let mut calls = Vec::with_capacity(parts.len());
    for (((part, comm), wire), sum) in parts.iter().zip(&mut held).zip(wires).zip(sums) {
        let call = comm.scattering(&part.stream, (wire, 0..wire.len()), sum);
        calls.push(call.map_err(|error| part.refused(op, error))?);
    }
    let issued = issue_together(calls);
    settled(parts, held, issued, op)
}

/// Every member gets the sum of what all have, in place.
#[cfg(feature = "nccl")]
pub(super) fn all_reduce(parts: &[Part], values: &mut [DeviceBuffer]) -> Result<(), Error> {
    let op = Op::AllReduce;
    let mut held = locked(parts);
    let mut calls = Vec::with_capacity(parts.len());
    for ((part, comm), values) in parts.iter().zip(&mut held).zip(values) {
        let call = comm.reducing(&part.stream, values);
        calls.push(call.map_err(|error| part.refused(op, error))?);
    }
    let issued = issue_together(calls);
    settled(parts, held, issued, op)
}

/// Where calls were not issued, nobody knows how far they have come: all their communicators are given up, and the world ends.
#[cfg(feature = "nccl")]
fn settled(
    parts: &[Part],
    mut held: Vec<crate::sync::MutexGuard<'_, crate::nccl::Communicator>>,
    issued: Result<(), NotIssued>,
    op: Op,
) -> Result<(), Error> {
    issued.map_err(|NotIssued { slot, error }| {
        held.iter_mut().for_each(|comm| comm.give_up());
        // The end is waited for, and nobody waits for a communicator meanwhile.
        drop(held);
        let part = &parts[slot];
        let error = part.refused(op, *error);
        part.end_world(&error);
        error
    })
}

/// The members' communicators: nobody else uses them meanwhile.
#[cfg(feature = "nccl")]
fn locked(parts: &[Part]) -> Vec<crate::sync::MutexGuard<'_, crate::nccl::Communicator>> {
    let comms = parts.iter().map(|part| part.nccl.as_ref().expect("all members go by NCCL"));
    comms.map(|comm| comm.lock()).collect()
}

/// Without NCCL nothing goes by it.
#[cfg(not(feature = "nccl"))]
mod absent {
    use super::{DeviceBuffer, Elements, Error, Part, Range};

    pub(in crate::device) fn all_gather(
        _: &[Part],
        _: &[Elements<'_>],
        _: (&mut [DeviceBuffer], Range<usize>),
    ) -> Result<(), Error> {
        unreachable!("no member goes by NCCL in this build")
    }

    pub(in crate::device) fn reduce_scatter(
        _: &[Part],
        _: &[DeviceBuffer],
        _: &mut [DeviceBuffer],
    ) -> Result<(), Error> {
        unreachable!("no member goes by NCCL in this build")
    }

    pub(in crate::device) fn all_reduce(_: &[Part], _: &mut [DeviceBuffer]) -> Result<(), Error> {
        unreachable!("no member goes by NCCL in this build")
    }
}

#[cfg(not(feature = "nccl"))]
pub(super) use self::absent::{all_gather, all_reduce, reduce_scatter};
