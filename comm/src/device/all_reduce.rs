//! The all-reduce of partials: each member sums what it owns of all, and gives it to everybody.

use std::ops::Range;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer};
use hsdp_kernels::{Fold, Scaling};
use hsdp_sharding::{DType, balanced};

use super::outcome::{Issued, OnDevice, Part, all_or_none, links};
use crate::execute::Buffers;
use crate::execute::{Meter, Outputs, Work};
use crate::nccl::{Link, Transfer};
use crate::pattern::Pattern;
use crate::{Error, Op};

/// Elements that a kernel takes at once: where ranges of its operands begin.
const WIDTH: usize = 4;

/// What a member brings.
pub(super) struct AllReduceContribution {
    pub(super) values: DeviceBuffer,
    pub(super) part: Part,
}

impl Buffers for AllReduceContribution {
    type Output = Issued<DeviceBuffer>;

    fn imagined(self, _pattern: &Pattern<'_>) -> Self::Output {
        Issued(Ok(self.values))
    }
}

impl OnDevice for AllReduceContribution {
    const FUNCTION: u8 = 11;

    fn part(&mut self) -> &mut Part {
        &mut self.part
    }
}

/// A scaled sum that replaces every member's elements.
pub(super) struct AllReduce {
    values: Vec<DeviceBuffer>,
    parts: Vec<Part>,
    scaling: Scaling,
    links: Vec<Link>,
}

impl AllReduce {
    /// # Errors
    /// If the buffers differ in length, which their descriptors should have told.
    pub(super) fn new(
        members: Vec<AllReduceContribution>,
        scaling: Scaling,
    ) -> Result<Self, String> {
        let len = members[0].values.len();
        if let Some(other) = members.iter().find(|member| member.values.len() != len) {
            return Err(format!("member 0 brings {len} elements, another {}", other.values.len()));
        }
        let (values, parts): (_, Vec<Part>) =
            members.into_iter().map(|it| (it.values, it.part)).unzip();
        let links = links(&parts)?;
        Ok(Self { values, parts, scaling, links })
    }

    fn owned(&self, slot: usize) -> Range<usize> {
        balanced(self.values[0].len(), self.values.len(), slot)
    }

    fn issue(&mut self) -> Result<(), Error> {
        let mut wires = Vec::new();
        for (values, part) in self.values.iter().zip(&self.parts) {
            let wire = self.rounded(values, part);
            wires.push(wire.map_err(|error| part.failed(Op::AllReduce, error))?);
        }
        if !self.links.is_empty() {
            return self.sum_by_nccl(wires);
        }
        let wires: Vec<&DeviceBuffer> = wires.iter().collect();
        for owner in 0..self.parts.len() {
            let summed = self.sum(owner, &wires);
            summed.map_err(|error| self.parts[owner].failed(Op::AllReduce, error))?;
        }
        Ok(())
    }

    /// NCCL sums what members send, in the dtype of the wire.
    fn sum_by_nccl(&mut self, mut wires: Vec<DeviceBuffer>) -> Result<(), Error> {
        let all = 0..self.values[0].len();
        let transfer = |wire| Transfer { from: None, to: (wire, all.clone()) };
        Link::carry(&self.links, Op::AllReduce, wires.iter_mut().map(transfer).collect())?;
        let scaled = (self.scaling.post, Fold::Replace);
        for ((values, wire), part) in self.values.iter_mut().zip(&wires).zip(&self.parts) {
            part.stream
                .sum(values, (&[wire], all.clone()), scaled, None)
                .map_err(|error| part.failed(Op::AllReduce, error))?;
        }
        Ok(())
    }

    /// What a member sends, on its stream.
    fn rounded(&self, values: &DeviceBuffer, part: &Part) -> Result<DeviceBuffer, CudaError> {
        let (device, wire) = (part.stream.device(), self.scaling.wire.dtype());
        let mut rounded = DeviceBuffer::new(device, wire, values.len(), "partials on the wire")?;
        part.stream.narrow(&mut rounded, values, self.scaling.pre)?;
        Ok(rounded)
    }

    /// What a member owns, on its stream: summed, and copied to everybody.
    fn sum(&mut self, owner: usize, wires: &[&DeviceBuffer]) -> Result<(), CudaError> {
        let (owned, stream) = (self.owned(owner), &self.parts[owner].stream);
        if owned.is_empty() {
            return Ok(());
        }
        // The kernel begins where its vectors do, a little before what is owned: that is summed, and not copied.
        let begin = owned.start / WIDTH * WIDTH;
        let summed = begin..owned.end;
        let mut sums =
            DeviceBuffer::new(stream.device(), DType::F32, summed.len(), "sums of partials")?;
        let scaled = (self.scaling.post, Fold::Replace);
        stream.sum(&mut sums, (wires, summed), scaled, None)?;
        for values in &mut self.values {
            let from = owned.start - begin..owned.end - begin;
            values.copy(stream, owned.clone(), (&sums, from))?;
        }
        Ok(())
    }
}

impl Work for AllReduce {
    type Output = Issued<DeviceBuffer>;

    fn blocks(&self) -> usize {
        0
    }

    /// To issue is little work, wherever it is done.
    fn bytes(&self) -> usize {
        0
    }

    fn run(&self, _block: usize, _meter: &Meter<'_>) {}

    fn finish(mut self) -> Outputs<Issued<DeviceBuffer>> {
        let issued = self.issue();
        all_or_none(self.values, issued).collect()
    }
}
