//! Sums of the members' contributions, and casts.

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Noted, Notes, Stream};
use hsdp_kernels::{Divisor, Fold, HostBuffer, Scaling, Wire, sum_contributions};
use hsdp_sharding::DType;

use crate::case::{Case, Failure};
use crate::source::{Source, host, numbers};

/// By what a sum is divided.
const POST: f32 = 2.0;

/// Where a member's numbers begin, from the one before.
const APART: usize = 1000;

/// How many members there are, what their wire is, and what is done with their sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Members {
    pub(crate) count: usize,
    pub(crate) wire: DType,
    pub(crate) fold: Fold,
}

/// [`Stream::sum`], which looks for what is not finite, as it does in a step.
pub(crate) struct Sum {
    members: Members,
    wires: Vec<DeviceBuffer>,
    target: DeviceBuffer,
    noted: Noted,
}

impl Sum {
    pub(crate) fn new(
        source: &Source<'_>,
        members: Members,
        len: usize,
    ) -> Result<Self, CudaError> {
        let wire = |member: usize| source.device(members.wire, first(member), len);
        let wires = (0..members.count).map(wire).collect::<Result<_, _>>()?;
        let target = source.device(DType::F32, 0, len)?;
        Ok(Self { members, wires, target, noted: Noted::new(source.stream)? })
    }
}

impl Case for Sum {
    fn bytes(&self) -> usize {
        let passes = match self.members.fold {
            Fold::Replace => 1,
            Fold::Add => 2,
        };
        let of_wires = self.members.count * self.members.wire.size_bytes();
        self.target.len() * (of_wires + passes * size_of::<f32>())
    }

    fn issue(&mut self, stream: &Stream, launches: u32) -> Result<(), CudaError> {
        let wires: Vec<_> = self.wires.iter().collect();
        let all = 0..self.target.len();
        (0..launches).try_for_each(|_| {
            let notes = Some(Notes { noted: &mut self.noted, round: 0 });
            let fold = self.members.fold;
            stream.sum(&mut self.target, &wires, all.clone(), divisor(POST), fold, notes)
        })
    }

    fn check(&self, source: &Source<'_>) -> Result<(), Failure> {
        let Members { count, wire, fold } = self.members;
        let len = self.target.len();
        let mut expected = numbers(0, len);
        let sent: Vec<_> = (0..count).map(|member| host(wire, first(member), len)).collect();
        let sent: Vec<_> = sent.iter().map(HostBuffer::values).collect();
        let scaling = Scaling { post: divisor(POST), ..Scaling::on(Wire::F32) };
        sum_contributions(&mut expected, &sent, scaling, fold);
        source.compare(&self.target, &expected.into(), "the sum")
    }
}

/// [`Stream::narrow`].
pub(crate) struct Narrow {
    source: DeviceBuffer,
    target: DeviceBuffer,
}

impl Narrow {
    pub(crate) fn new(source: &Source<'_>, dtype: DType, len: usize) -> Result<Self, CudaError> {
        let target = source.empty(dtype, len)?;
        Ok(Self { source: source.device(DType::F32, 0, len)?, target })
    }
}

impl Case for Narrow {
    fn bytes(&self) -> usize {
        self.target.len() * (size_of::<f32>() + self.target.dtype().size_bytes())
    }

    fn issue(&mut self, stream: &Stream, launches: u32) -> Result<(), CudaError> {
        (0..launches).try_for_each(|_| stream.narrow(&mut self.target, &self.source, Divisor::ONE))
    }

    fn check(&self, source: &Source<'_>) -> Result<(), Failure> {
        let expected = host(self.target.dtype(), 0, self.target.len());
        source.compare(&self.target, &expected, "what was cast")
    }
}

/// The first of a member's numbers.
fn first(member: usize) -> usize {
    (member + 1) * APART
}

fn divisor(by: f32) -> Divisor {
    Divisor::new(by).expect("a divisor")
}
