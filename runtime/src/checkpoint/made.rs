//! A generation whose save failed after rank 0 had made it. The next call of the same save returns it.

use std::path::{Path, PathBuf};

use crate::model::ModelId;

/// The content of a save: the parameters after a number of steps and of loads, and digests of `user` and of the optimizer's options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) model: ModelId,
    pub(super) loads: u64,
    pub(super) step: u64,
    pub(super) digests: [u64; 2],
}

/// A generation on rank 0 of which the other ranks have not learned.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) content: Content,
    pub(super) path: PathBuf,
}

impl Made {
    /// Its directory, if it has this content.
    pub(super) fn path_of(&self, content: &Content) -> Option<&Path> {
        (self.content == *content).then_some(&self.path)
    }
}
