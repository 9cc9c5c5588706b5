//! In place of NCCL: no group goes by it in this build.

#[expect(unreachable_pub, dead_code, reason = "only NCCL reads it, and makes it public")]
mod transfer;

use std::sync::Arc;

pub(crate) use self::transfer::Transfer;
use crate::call::Issuing;
use crate::threads::OwnRank;
use crate::{Error, GroupId, Op};

/// There is none.
#[derive(Clone, Debug)]
pub(crate) struct NcclCarrier {
    pub(crate) issuing: Option<Issuing>,
    never: Never,
}

#[derive(Clone, Debug)]
enum Never {}

impl NcclCarrier {
    pub(crate) fn carry(carriers: &[Self], _: Op, _: Vec<Transfer<'_>>) -> Result<(), Error> {
        match carriers[0].never {}
    }
}

/// The communicators of a rank, which has none.
#[derive(Debug, Default)]
pub(crate) struct Connected {}

#[expect(
    clippy::unused_self,
    reason = "the calls are those of the communicators that a rank has with NCCL"
)]
impl Connected {
    pub(crate) fn carrier(&self, _: &Arc<OwnRank>, _: GroupId, _: u64) -> Option<NcclCarrier> {
        None
    }

    pub(crate) fn await_drained(&self, _: &OwnRank) -> Result<(), Error> {
        Ok(())
    }

    pub(crate) fn leave(&self, _: &OwnRank) {}

    pub(crate) fn close(&self) {}

    pub(crate) fn give_up(&self) {}
}
