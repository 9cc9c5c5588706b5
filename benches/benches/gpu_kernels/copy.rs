//! The copy that others are measured against.

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Stream};
use hsdp_sharding::DType;

use crate::case::{Case, Failure};
use crate::source::{Source, host};

/// The whole of one buffer to another.
pub(crate) struct Copy {
    source: DeviceBuffer,
    target: DeviceBuffer,
}

impl Copy {
    /// One that reads and writes so many bytes together.
    pub(crate) fn moving(source: &Source<'_>, bytes: usize) -> Result<Self, CudaError> {
        let len = (bytes / 2).div_ceil(size_of::<f32>());
        let target = source.empty(DType::F32, len)?;
        let source = source.device(DType::F32, 0, len)?;
        Ok(Self { source, target })
    }
}

impl Case for Copy {
    fn bytes(&self) -> usize {
        2 * self.source.len() * size_of::<f32>()
    }

    fn issue(&mut self, stream: &Stream, launches: u32) -> Result<(), CudaError> {
        let all = 0..self.source.len();
        (0..launches)
            .try_for_each(|_| self.target.copy(stream, all.clone(), &self.source, all.clone()))
    }

    fn check(&self, source: &Source<'_>) -> Result<(), Failure> {
        source.compare(&self.target, &host(DType::F32, 0, self.source.len()), "the copy")
    }
}
