//! The id by which the ranks of a communicator find each other.

use std::fmt;

use nccl_sys::{ncclResult_t, ncclUniqueId};

use super::NcclError;
use super::communicator::{load, refused};

/// The id by which the ranks of a communicator find each other. One rank makes it, and the program sends it to the others.
#[derive(Clone, Copy)]
pub struct UniqueId(ncclUniqueId);

impl UniqueId {
    pub(super) fn raw(self) -> ncclUniqueId {
        self.0
    }

    /// In place of an id, of ranks that make none.
    pub(crate) const NONE: Self = Self(ncclUniqueId { internal: [0; 128] });

    /// The number of its words.
    pub(crate) const WORDS: usize = 16;

    pub(crate) fn words(&self) -> [u64; Self::WORDS] {
        bytemuck::cast(self.0.internal)
    }

    pub(crate) fn of_words(words: &[u64; Self::WORDS]) -> Self {
        Self(ncclUniqueId { internal: bytemuck::cast(*words) })
    }

    /// Makes a new id.
    ///
    /// # Errors
    /// [`NcclError::Missing`] if NCCL cannot be loaded; [`NcclError::Refused`].
    pub fn new() -> Result<Self, NcclError> {
        let nccl = load()?;
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: NC-4, it writes an id to where it is told to.
        let status = unsafe { (nccl.functions().ncclGetUniqueId)(&raw mut id) };
        match status {
            ncclResult_t::ncclSuccess => Ok(Self(id)),
            status => Err(refused(nccl, std::ptr::null_mut(), ("unique id", 0, 0), status)),
        }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}
