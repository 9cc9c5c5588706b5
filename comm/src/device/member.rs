//! A member of an operation on devices: its buffers, and its own part of the arithmetic.

use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Noted, Notes, Stream};
use hsdp_kernels::{Fold, GradientValues, Scaling};
use hsdp_sharding::{DType, Rank, UnitLayout};

use super::units::DeviceReduced;
use super::work::Issue;
use crate::execute::{At, Contribute};
use crate::nccl::Carrier;
use crate::{Error, Op};

/// The contribution of a member.
pub(crate) struct Member {
    pub(super) caller: Caller,
    pub(super) input: Input,
    /// The whole unit of a gather, the partial of a reduction, or the elements of an all-reduce.
    pub(super) output: DeviceBuffer,
    /// The elements for the wire, or the error of packing them.
    pub(super) packed: Option<Result<DeviceBuffer, CudaError>>,
}

/// A member's rank and step, and its ways to its device and to the others.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(super) rank: Rank,
    pub(super) step: u64,
    pub(super) stream: Arc<Stream>,
    /// `None` where the group does not go by NCCL.
    pub(super) carrier: Option<Carrier>,
}

/// The elements that a member brings, by operation.
pub(super) enum Input {
    Gather { layout: Arc<UnitLayout>, shard: Arc<DeviceBuffer> },
    Reduce(Gradients),
    AllReduce(Scaling),
}

/// The gradients of a unit, in one microbatch.
pub(super) struct Gradients {
    pub(super) layout: Arc<UnitLayout>,
    pub(super) values: Vec<Option<Arc<dyn GradientValues>>>,
    pub(super) scaling: Scaling,
    pub(super) fold: Fold,
    pub(super) noted: Noted,
    pub(super) microbatch: usize,
}

/// The buffer and the notes that a member gets, or the reason that there are none.
pub(crate) struct DeviceOutput(pub(super) Result<(DeviceBuffer, Option<Noted>), Error>);

impl TryFrom<DeviceOutput> for DeviceBuffer {
    type Error = Error;

    fn try_from(issued: DeviceOutput) -> Result<Self, Error> {
        issued.0.map(|(buffer, _)| buffer)
    }
}

impl TryFrom<DeviceOutput> for DeviceReduced {
    type Error = Error;

    fn try_from(issued: DeviceOutput) -> Result<Self, Error> {
        let (partial, noted) = issued.0?;
        Ok(Self { partial, noted: noted.expect("a reduction has notes") })
    }
}

impl Contribute for Member {
    type Gets = DeviceOutput;
    type Work = Issue;

    fn gradients(&mut self) -> &mut [Option<Arc<dyn GradientValues>>] {
        match &mut self.input {
            Input::Reduce(gradients) => &mut gradients.values,
            _ => &mut [],
        }
    }

    fn assemble(all: Vec<Self>, _at: At<'_>) -> Result<Issue, String> {
        Issue::new(all)
    }

    fn alone(self, _at: At<'_>) -> DeviceOutput {
        DeviceOutput(Ok(self.into_output()))
    }
}

impl Member {
    pub(super) fn op(&self) -> Op {
        match self.input {
            Input::Gather { .. } => Op::AllGather,
            Input::Reduce(_) => Op::ReduceScatter,
            Input::AllReduce(_) => Op::AllReduce,
        }
    }

    /// The layout of the unit that was passed.
    pub(super) fn layout(&self) -> Option<&Arc<UnitLayout>> {
        match &self.input {
            Input::Gather { layout, .. } => Some(layout),
            Input::Reduce(gradients) => Some(&gradients.layout),
            Input::AllReduce(_) => None,
        }
    }

    pub(super) fn into_output(self) -> (DeviceBuffer, Option<Noted>) {
        match self.input {
            Input::Reduce(gradients) => (self.output, Some(gradients.noted)),
            _ => (self.output, None),
        }
    }

    /// Elements on this member's device.
    pub(super) fn room(
        &self,
        dtype: DType,
        len: usize,
        what: &'static str,
    ) -> Result<DeviceBuffer, CudaError> {
        DeviceBuffer::new(self.caller.stream.device(), dtype, len, what)
    }

    /// Packs the elements for the wire, on the member's stream.
    pub(super) fn pack(&mut self) {
        let stream = Arc::clone(&self.caller.stream);
        let packed = match &mut self.input {
            Input::Gather { .. } => return,
            Input::Reduce(gradients) => gradients.packed(&stream),
            Input::AllReduce(scaling) => rounded(&stream, &self.output, *scaling),
        };
        self.packed = Some(packed);
    }

    /// Sums a range of what members have packed into the output.
    pub(super) fn sum(
        &mut self,
        wires: &[&DeviceBuffer],
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        let (stream, output) = (&self.caller.stream, &mut self.output);
        match &mut self.input {
            Input::Gather { .. } => Ok(()),
            Input::Reduce(Gradients { scaling, fold, noted, microbatch, .. }) => {
                let notes = Some(Notes { noted, round: *microbatch });
                stream.sum(output, (wires, range), (scaling.post, *fold), notes)
            }
            Input::AllReduce(scaling) => {
                stream.sum(output, (wires, range), (scaling.post, Fold::Replace), None)
            }
        }
    }

    /// The error that says that this member's part failed.
    pub(super) fn failed(&self, error: CudaError) -> Error {
        let Caller { rank, step, .. } = self.caller;
        Error::Device { op: self.op(), rank, step, error }
    }
}

impl Gradients {
    fn packed(&mut self, stream: &Stream) -> Result<DeviceBuffer, CudaError> {
        let (wire, len) = (self.scaling.wire.dtype(), self.layout.trainable().len);
        let mut flat = DeviceBuffer::new(stream.device(), wire, len, "packed gradients")?;
        let there = self.layout.params().iter().zip(&self.values);
        let gradients: Vec<_> =
            there.map(|(slot, gradient)| (slot.start, gradient.as_deref())).collect();
        let notes = Notes { noted: &mut self.noted, round: self.microbatch };
        stream.pack_gradients(&mut flat, &gradients, self.scaling.pre, Some(notes))?;
        Ok(flat)
    }
}

fn rounded(
    stream: &Stream,
    values: &DeviceBuffer,
    scaling: Scaling,
) -> Result<DeviceBuffer, CudaError> {
    let (device, wire) = (stream.device(), scaling.wire.dtype());
    let mut rounded = DeviceBuffer::new(device, wire, values.len(), "partials on the wire")?;
    stream.narrow(&mut rounded, values, scaling.pre)?;
    Ok(rounded)
}
