//! The id by which the ranks of a communicator find each other.

use std::fmt;

use nccl_sys::{ncclResult_t, ncclUniqueId};

use super::NcclError;
use super::communicator::{load, refused};

/// The id by which the ranks of a communicator find each other. One rank makes it, and the program sends it to the others.
#[derive(Clone, Copy)]
pub struct UniqueId(pub(crate) [u64; 16]);

impl UniqueId {
    /// In place of an id, of ranks that make none.
    pub(crate) const NONE: Self = Self([0; 16]);

    pub(super) fn raw(self) -> ncclUniqueId {
        ncclUniqueId { internal: bytemuck::cast(self.0) }
    }

    /// Makes a new id.
    ///
    /// # Errors
    /// [`NcclError::Missing`] if NCCL cannot be loaded; [`NcclError::Refused`].
    pub fn new() -> Result<Self, NcclError> {
        let nccl = load()?;
        let mut id = Self::NONE.raw();
        // SAFETY: NC-4, it writes an id to where it is told to.
        let status = unsafe { (nccl.functions().ncclGetUniqueId)(&raw mut id) };
        match status {
            ncclResult_t::ncclSuccess => Ok(Self(bytemuck::cast(id.internal))),
            status => Err(refused(nccl, std::ptr::null_mut(), ("unique id", 0, 0), status)),
        }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}
