//! The reduce-scatter of a unit: each member packs its gradients for the wire, and each owner sums what all have packed.

use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Notes};
use hsdp_kernels::{GradientValues, Scaling};
use hsdp_sharding::UnitLayout;

use super::outcome::{Issued, OnDevice, Part, all_or_none, links};
use super::units::{DeviceAccumulator, DeviceReduced};
use crate::execute::Buffers;
use crate::execute::{Meter, Outputs, Work};
use crate::nccl::{Link, Transfer};
use crate::pattern::Pattern;
use crate::sync::Mutex;
use crate::{Error, Op};

/// What a member brings.
pub(crate) struct ReduceContribution {
    pub(super) layout: Arc<UnitLayout>,
    pub(crate) gradients: Vec<Option<Arc<dyn GradientValues>>>,
    pub(super) accumulator: DeviceAccumulator,
    pub(super) part: Part,
    /// The packed gradients, or the error of packing.
    pub(super) packed: Option<Result<DeviceBuffer, CudaError>>,
}

impl Buffers for ReduceContribution {
    type Output = Issued<DeviceReduced>;

    fn gradients(&mut self) -> &mut [Option<Arc<dyn GradientValues>>] {
        &mut self.gradients
    }

    fn imagined(self, _pattern: &Pattern<'_>) -> Self::Output {
        let DeviceAccumulator { partial, noted, .. } = self.accumulator;
        Issued(Ok(DeviceReduced { partial, noted }))
    }
}

impl OnDevice for ReduceContribution {
    const FUNCTION: u8 = 10;

    fn part(&mut self) -> &mut Part {
        &mut self.part
    }

    fn layout(&self) -> Option<&UnitLayout> {
        Some(&self.layout)
    }
}

/// Every member's gradients, summed into the partial of whoever owns them.
pub(super) struct Reduce {
    layout: Arc<UnitLayout>,
    scaling: Scaling,
    /// Which microbatch it is.
    round: usize,
    /// By slot. A member is packed under its lock.
    members: Vec<Mutex<ReduceContribution>>,
    links: Vec<Link>,
}

impl ReduceContribution {
    /// Packs the gradients on the member's stream.
    fn pack(&mut self, scaling: Scaling, round: usize) -> Result<DeviceBuffer, CudaError> {
        let (stream, wire) = (&self.part.stream, scaling.wire.dtype());
        let len = self.layout.trainable().len;
        let mut flat = DeviceBuffer::new(stream.device(), wire, len, "packed gradients")?;
        let there = self.layout.params().iter().zip(&self.gradients);
        let gradients: Vec<_> =
            there.map(|(slot, gradient)| (slot.start, gradient.as_deref())).collect();
        let notes = Notes { noted: &mut self.accumulator.noted, round };
        stream.pack_gradients(&mut flat, &gradients, scaling.pre, Some(notes))?;
        Ok(flat)
    }
}

/// What the sums of all members read and write.
struct Sums<'a> {
    wires: &'a [DeviceBuffer],
    reduced: &'a mut [DeviceReduced],
    folds: &'a [hsdp_kernels::Fold],
    parts: &'a [Part],
}

impl Reduce {
    /// # Errors
    /// If the members do not have the same layout.
    pub(super) fn new(
        members: Vec<ReduceContribution>,
        scaling: Scaling,
        round: usize,
    ) -> Result<Self, String> {
        let layout = Arc::clone(&members[0].layout);
        if members.iter().any(|member| member.layout != layout) {
            return Err("ranks have different layouts of one unit".to_owned());
        }
        let parts: Vec<Part> = members.iter().map(|member| member.part.clone()).collect();
        let links = links(&parts)?;
        let members = members.into_iter().map(Mutex::new).collect();
        Ok(Self { layout, scaling, round, members, links })
    }

    /// Elements of the partial of each member.
    fn shard_len(&self) -> usize {
        self.layout.trainable().shard_len
    }

    /// NCCL sums what members have packed, in the dtype of the wire; what each owns of it goes into its partial.
    fn sum_by_nccl(&self, sums: &mut Sums<'_>) -> Result<(), Error> {
        let op = Op::ReduceScatter;
        let mut owned = Vec::with_capacity(sums.parts.len());
        for part in sums.parts {
            let (device, wire) = (part.stream.device(), self.scaling.wire.dtype());
            let sum = DeviceBuffer::new(device, wire, self.shard_len(), "a sum on the wire");
            owned.push(sum.map_err(|error| part.failed(op, error))?);
        }
        let transfers = sums.wires.iter().zip(&mut owned).map(|(wire, sum)| {
            let (all, owned) = (0..self.layout.trainable().len, 0..self.shard_len());
            Transfer { from: Some((wire, all)), to: (sum, owned) }
        });
        Link::carry(&self.links, op, transfers.collect())?;
        let owners = sums.reduced.iter_mut().zip(sums.folds).zip(sums.parts).zip(&owned);
        for (((DeviceReduced { partial, noted }, fold), part), sum) in owners {
            let notes = Some(Notes { noted, round: self.round });
            let all = 0..self.shard_len();
            part.stream
                .sum(partial, (&[sum], all), (self.scaling.post, *fold), notes)
                .map_err(|error| part.failed(op, error))?;
        }
        Ok(())
    }

    fn sum(&self, sums: &mut Sums<'_>) -> Result<(), Error> {
        if !self.links.is_empty() {
            return self.sum_by_nccl(sums);
        }
        let wires: Vec<&DeviceBuffer> = sums.wires.iter().collect();
        let owners = sums.reduced.iter_mut().zip(sums.folds).zip(sums.parts).enumerate();
        for (owner, ((DeviceReduced { partial, noted }, fold), part)) in owners {
            let range = owner * self.shard_len()..(owner + 1) * self.shard_len();
            let notes = Some(Notes { noted, round: self.round });
            part.stream
                .sum(partial, (&wires, range), (self.scaling.post, *fold), notes)
                .map_err(|error| part.failed(Op::ReduceScatter, error))?;
        }
        Ok(())
    }
}

impl Work for Reduce {
    type Output = Issued<DeviceReduced>;

    fn blocks(&self) -> usize {
        self.members.len()
    }

    /// To issue is little work, wherever it is done.
    fn bytes(&self) -> usize {
        0
    }

    /// Gradients on the host are lent by code of users.
    fn calls_users(&self) -> bool {
        true
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        let member = &mut *self.members[block].lock();
        meter.lent_by(block, || member.packed = Some(member.pack(self.scaling, self.round)));
    }

    fn finish(mut self) -> Outputs<Issued<DeviceReduced>> {
        let (mut wires, mut reduced) = (Vec::new(), Vec::new());
        let (mut folds, mut parts, mut issued) = (Vec::new(), Vec::new(), Ok(()));
        for member in std::mem::take(&mut self.members) {
            let ReduceContribution { accumulator, part, packed, .. } = member.into_inner();
            match packed.expect("all blocks were run") {
                Ok(wire) => wires.push(wire),
                Err(error) => issued = issued.and(Err(part.failed(Op::ReduceScatter, error))),
            }
            let DeviceAccumulator { partial, fold, noted } = accumulator;
            reduced.push(DeviceReduced { partial, noted });
            folds.push(fold);
            parts.push(part);
        }
        let issued = issued.and_then(|()| {
            let (wires, folds, parts) = (&wires, &folds, &parts);
            self.sum(&mut Sums { wires, reduced: &mut reduced, folds, parts })
        });
        all_or_none(reduced, issued).collect()
    }
}
