//! In place of NCCL: no group goes by it in this build.

mod transfer;

use std::sync::Arc;

use hsdp_sharding::Rank;

pub(crate) use self::transfer::Transfer;
use crate::backend::thread::Access;
use crate::call::Issuing;
use crate::{Error, GroupId, Op};

/// There is none.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) issuing: Option<Issuing>,
    never: Never,
}

#[derive(Clone, Debug)]
enum Never {}

impl Link {
    pub(crate) fn carry(links: &[Self], _: Op, _: Vec<Transfer<'_>>) -> Result<(), Error> {
        match links[0].never {}
    }
}

/// The communicators of a rank, which has none.
#[derive(Debug, Default)]
pub(crate) struct Held(());

impl Held {
    pub(crate) fn link(&self, _: (&Arc<Access>, Rank), _: GroupId, _: u64) -> Option<Link> {
        let Self(()) = self;
        None
    }

    pub(crate) fn await_drained(&self, _: (&Arc<Access>, Rank)) -> Result<(), Error> {
        let Self(()) = self;
        Ok(())
    }

    pub(crate) fn leave(&self, _: &Access, _: Rank) {
        let Self(()) = self;
    }

    pub(crate) fn give_up(&self) {
        let Self(()) = self;
    }
}
