//! What a member gets of an operation that a device may refuse.

use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Stream};
use hsdp_sharding::Rank;

use super::units::DeviceReduced;
use crate::{Error, Op};

/// An output, or why there is none.
pub(crate) struct Issued<T>(pub(super) Result<T, Error>);

impl TryFrom<Issued<Self>> for DeviceBuffer {
    type Error = Error;

    fn try_from(issued: Issued<Self>) -> Result<Self, Error> {
        issued.0
    }
}

impl TryFrom<Issued<Self>> for DeviceReduced {
    type Error = Error;

    fn try_from(issued: Issued<Self>) -> Result<Self, Error> {
        issued.0
    }
}

/// Who a member is, and on which stream its part runs.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(super) rank: Rank,
    pub(super) step: u64,
    pub(super) stream: Arc<Stream>,
    /// To end the world, also when its rank leaves; none where there are no other ranks.
    #[cfg(feature = "nccl")]
    pub(super) access: Option<Arc<crate::backend::thread::Access>>,
    /// Its communicator, where the group goes by NCCL.
    #[cfg(feature = "nccl")]
    pub(super) nccl: Option<crate::nccl::SharedCommunicator>,
}

impl Part {
    /// Ends the world of its rank.
    pub(super) fn end_world(&self, error: &Error) {
        #[cfg(feature = "nccl")]
        if let Some(access) = &self.access {
            access.end_requested(self.rank, &error.to_string());
        }
        // Without NCCL nothing is issued that others are in the midst of.
        #[cfg(not(feature = "nccl"))]
        let _ = error;
    }

    /// The error that says that this member's part failed.
    pub(super) fn failed(&self, op: Op, error: CudaError) -> Error {
        Error::Device { op, rank: self.rank, step: self.step, error }
    }
}

/// What members get: all of them their outputs, or all the first error. A part that failed is one that others were to read.
pub(super) fn all_or_none<T>(
    outputs: impl IntoIterator<Item = T>,
    issued: Result<(), Error>,
) -> impl Iterator<Item = Issued<T>> {
    outputs.into_iter().map(move |output| Issued(issued.clone().map(|()| output)))
}
