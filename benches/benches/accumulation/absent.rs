//! In place of NCCL, in a build without it.

use hsdp::Rank;

use crate::bare::OwnLoop;
use crate::options::Options;

/// There is none.
pub(crate) enum Meeting {}

impl Meeting {
    pub(crate) fn new() -> Result<Self, String> {
        Err("this build has no NCCL".to_owned())
    }

    pub(crate) fn own(&self, _: &Options, _: Rank) -> Result<Box<dyn OwnLoop>, String> {
        match *self {}
    }
}
