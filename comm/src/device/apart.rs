//! What lies on devices, where members share no memory: parcels are empty, and this process issues its own part by NCCL when all have
//! come. `REMOTE.md`, "Operations on devices".

use hsdp_kernels::Scaling;
use hsdp_kernels::cuda::DeviceBuffer;
use hsdp_sharding::balanced;

use super::all_reduce::{AllReduce, AllReduceDeposit};
use super::gather::{Gather, GatherDeposit};
use super::outcome::{Issued, Part};
use super::reduce::{Reduce, ReduceDeposit};
use super::units::DeviceReduced;
use crate::Error;
use crate::execute::Work;
use crate::remote::{At, Form, Parcels, Travels, Turn, digest};

/// What a member brings that lies on a device.
pub(super) trait OnDevice {
    fn part(&self) -> &Part;
}

impl OnDevice for GatherDeposit {
    fn part(&self) -> &Part {
        &self.part
    }
}

impl OnDevice for ReduceDeposit {
    fn part(&self) -> &Part {
        &self.part
    }
}

impl OnDevice for AllReduceDeposit {
    fn part(&self) -> &Part {
        &self.part
    }
}

impl Travels for GatherDeposit {
    type Output = Issued<DeviceBuffer>;

    fn form(&self) -> Form {
        Form { function: 9, layout: digest(&self.layout), note: 0 }
    }

    fn beside(&self, _at: &At, _from: usize) -> Option<usize> {
        Some(self.shard.len() * self.shard.dtype().size_bytes())
    }

    fn unpack(self, _at: &At, _parcels: &Parcels) -> Turn<Self> {
        let part = self.part.clone();
        Turn::Done(issued(&part, Gather::new(vec![self])))
    }
}

impl Travels for ReduceDeposit {
    type Output = Issued<DeviceReduced>;

    fn form(&self) -> Form {
        Form { function: 10, layout: digest(&self.layout), note: 0 }
    }

    fn keep(&mut self, at: &At) -> Result<(), Error> {
        let (scaling, round) = (scaling(at), at.descriptor.tag.microbatch);
        self.pack(scaling, round);
        self.gradients.clear();
        match &self.packed {
            Some(Err(error)) => Err(self.part.failed(at.descriptor.op, error.clone())),
            _ => Ok(()),
        }
    }

    fn beside(&self, at: &At, _from: usize) -> Option<usize> {
        Some(self.layout.trainable().shard_len * scaling(at).wire.dtype().size_bytes())
    }

    fn unpack(self, at: &At, _parcels: &Parcels) -> Turn<Self> {
        let part = self.part.clone();
        let work = Reduce::new(vec![self], scaling(at), at.descriptor.tag.microbatch);
        Turn::Done(issued(&part, work))
    }
}

impl Travels for AllReduceDeposit {
    type Output = Issued<DeviceBuffer>;

    fn form(&self) -> Form {
        Form { function: 11, ..Form::default() }
    }

    /// As where members share memory: of this member's own slice what the other contributes, and the slice of the other.
    fn beside(&self, at: &At, from: usize) -> Option<usize> {
        let slice = |slot| balanced(self.values.len(), at.members(), slot).len();
        let contributed = slice(at.slot) * scaling(at).wire.dtype().size_bytes();
        Some(contributed + slice(from) * size_of::<f32>())
    }

    fn unpack(self, at: &At, _parcels: &Parcels) -> Turn<Self> {
        let part = self.part.clone();
        Turn::Done(issued(&part, AllReduce::new(vec![self], scaling(at))))
    }
}

fn scaling(at: &At) -> Scaling {
    at.descriptor.scaling.expect("what is summed has one")
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
