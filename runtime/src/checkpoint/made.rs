//! A generation whose save failed after rank 0 had made it. The next call of the same save returns
//! it.

use std::path::{Path, PathBuf};

use hsdp_checkpoint::Committed;

use crate::state::context::ModelId;

/// The identity of a save: the parameters after a number of steps and of loads, and digests of
/// `user` and of the optimizer's options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) model: ModelId,
    pub(super) loads: u64,
    pub(super) step: u64,
    pub(super) digests: [u64; 3],
}

/// A generation on rank 0 of which the other ranks have not learned.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) identity: Identity,
    pub(super) path: PathBuf,
}

impl Made {
    /// Its directory, if it is of this save.
    pub(super) fn path_of(&self, identity: &Identity) -> Option<&Path> {
        (self.identity == *identity).then_some(&self.path)
    }
}

/// Returns the checkpoint's directory. Work that failed after the commit is logged, and is not a
/// failure of the save.
pub(super) fn told(committed: Committed) -> PathBuf {
    for error in committed.left_undone {
        hsdp_warnings::warn!(%error, "the checkpoint is saved; the part that failed is tried again with \
                                the next");
    }
    committed.path
}
