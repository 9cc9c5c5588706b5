//! What a member gets of an operation that a device may refuse.

use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Stream};
use hsdp_sharding::{Rank, UnitLayout};

use super::units::DeviceReduced;
use crate::execute::Buffers;
use crate::nccl::Link;
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
    /// Its way to the others, where the group goes by NCCL.
    pub(super) link: Option<Link>,
}

/// The contribution of a member that lies on a device.
pub(super) trait OnDevice: Buffers + Sized {
    /// The function that was called: descriptors alone do not tell all of them apart.
    const FUNCTION: u8;

    fn part(&mut self) -> &mut Part;

    /// The layout of a unit that was passed.
    fn layout(&self) -> Option<&UnitLayout> {
        None
    }
}

/// The ways of all members, if all go by NCCL, and none if none does.
///
/// # Errors
/// If only some do.
pub(super) fn links(parts: &[Part]) -> Result<Vec<Link>, String> {
    let links: Vec<Link> = parts.iter().filter_map(|part| part.link.clone()).collect();
    match links.len() {
        some if some > 0 && some < parts.len() => {
            Err(format!("{some} of {} ranks go by NCCL", parts.len()))
        }
        _ => Ok(links),
    }
}

impl Part {
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
