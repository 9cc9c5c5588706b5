//! The squared norm of a buffer, and whether it is finite.

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Seen, Stream};
use hsdp_kernels::squared_norm;
use hsdp_sharding::DType;

use crate::case::{Case, Ends, Failure};
use crate::source::{PATIENCE, Source, numbers};

/// How far the sum may be from the twin's, which adds in another order: of 20,000 elements in f64.
const TOLERANCE: f64 = 1e-12;

/// [`Stream::inspect`].
pub(crate) struct Inspect {
    values: DeviceBuffer,
    seen: Option<Seen>,
}

impl Inspect {
    pub(crate) fn new(source: &Source<'_>, len: usize) -> Result<Self, CudaError> {
        Ok(Self { values: source.device(DType::F32, 0, len)?, seen: None })
    }
}

impl Case for Inspect {
    fn bytes(&self) -> usize {
        self.values.len() * size_of::<f32>()
    }

    fn ends(&self) -> Ends {
        Ends::WithTheCall
    }

    fn issue(&mut self, stream: &Stream, launches: u32) -> Result<(), CudaError> {
        let seen = stream
            .inspect(&vec![(&self.values, 0..self.values.len()); launches as usize], PATIENCE)?;
        self.seen = seen.last().copied();
        Ok(())
    }

    fn check(&self, _: &Source<'_>) -> Result<(), Failure> {
        let twin = squared_norm(&numbers(0, self.values.len()));
        let is_right = |seen: &Seen| {
            let apart = (seen.squared_norm - twin).abs();
            apart <= TOLERANCE * twin && seen.first_non_finite.is_none()
        };
        let wrong =
            || format!("{:?}, where the twin has {twin} and nothing that is not finite", self.seen);
        self.seen.filter(is_right).map(drop).ok_or_else(|| Failure::Wrong(wrong()))
    }
}
