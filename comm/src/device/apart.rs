//! Operations on devices, where members share no memory: messages are empty, and this process issues its own part by NCCL when all have
//! come. `REMOTE.md`, "Operations on devices".

use std::ops::ControlFlow::Break;
use std::sync::Arc;

use hsdp_kernels::GradientValues;
use hsdp_kernels::cuda::DeviceBuffer;
use hsdp_sharding::UnitLayout;

use super::all_reduce::{AllReduce, AllReduceContribution};
use super::gather::{Gather, GatherContribution};
use super::outcome::{Issued, Part};
use super::reduce::{Reduce, ReduceContribution};
use super::units::{DeviceAccumulator, DeviceReduced};
use crate::Error;
use crate::execute::{Buffers, Work};
use crate::pattern::Pattern;
use crate::remote::{At, DataMessages, Next, Transmit};

/// What a member brings that lies on a device.
pub(super) trait OnDevice: Transmit {
    fn part(&self) -> &Part;
}

impl OnDevice for GatherContribution {
    fn part(&self) -> &Part {
        &self.part
    }
}

impl OnDevice for ReduceContribution {
    fn part(&self) -> &Part {
        &self.part
    }
}

impl OnDevice for AllReduceContribution {
    fn part(&self) -> &Part {
        &self.part
    }
}

impl Buffers for GatherContribution {
    type Output = Issued<DeviceBuffer>;

    fn imagined(self, _pattern: &Pattern<'_>) -> Self::Output {
        Issued(Ok(self.full))
    }
}

impl Transmit for GatherContribution {
    const FUNCTION: u8 = 9;
    const BESIDE: bool = true;

    fn layout(&self) -> Option<&UnitLayout> {
        Some(&self.layout)
    }

    fn unpack(self, _at: &At, _messages: &DataMessages) -> Next<Self> {
        let part = self.part.clone();
        Break(issued(&part, Gather::new(vec![self])))
    }
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

impl Transmit for ReduceContribution {
    const FUNCTION: u8 = 10;
    const BESIDE: bool = true;

    fn layout(&self) -> Option<&UnitLayout> {
        Some(&self.layout)
    }

    fn keep(&mut self, at: &At) -> Result<(), Error> {
        self.pack(at.scaling(), at.meant.tag.microbatch);
        self.gradients.clear();
        match &self.packed {
            Some(Err(error)) => Err(self.part.failed(at.meant.op, error.clone())),
            _ => Ok(()),
        }
    }

    fn unpack(self, at: &At, _messages: &DataMessages) -> Next<Self> {
        let part = self.part.clone();
        let work = Reduce::new(vec![self], at.scaling(), at.meant.tag.microbatch);
        Break(issued(&part, work))
    }
}

impl Buffers for AllReduceContribution {
    type Output = Issued<DeviceBuffer>;

    fn imagined(self, _pattern: &Pattern<'_>) -> Self::Output {
        Issued(Ok(self.values))
    }
}

impl Transmit for AllReduceContribution {
    const FUNCTION: u8 = 11;
    const BESIDE: bool = true;

    fn unpack(self, at: &At, _messages: &DataMessages) -> Next<Self> {
        let part = self.part.clone();
        Break(issued(&part, AllReduce::new(vec![self], at.scaling())))
    }
}

/// Issues a member's part. The others may be in the midst of theirs: an error ends the world.
fn issued<T, W: Work<Output = Issued<T>>>(part: &Part, work: Result<W, String>) -> Issued<T> {
    let mut outputs = work.expect("one member agrees with itself").finish();
    let issued = outputs.take(0).expect("it has one output");
    if let Issued(Err(error)) = &issued {
        part.end_world(error);
    }
    issued
}
