//! In place of NCCL: no group goes by it in this build.

mod transfer;

use hsdp_sharding::Rank;

pub(crate) use self::transfer::Transfer;
use crate::backend::thread::Access;
use crate::call::Issuing;
use crate::handle::RankHandle;
use crate::{Error, GroupId, Op};

/// There is none.
#[derive(Clone, Debug)]
pub(crate) enum Link {}

impl Link {
    pub(crate) fn of(_: &RankHandle, _: GroupId, _: u64) -> Option<Self> {
        None
    }

    pub(crate) fn issues(&mut self, _: Issuing) {
        match *self {}
    }

    pub(crate) fn carry(links: &[Self], _: Op, _: Vec<Transfer<'_>>) -> Result<(), Error> {
        match links[0] {}
    }
}

/// The communicators of a rank, which has none.
#[derive(Debug, Default)]
pub(crate) struct Held(());

impl Held {
    pub(crate) fn leave(&self, _: &Access, _: Rank) {
        let Self(()) = self;
    }

    pub(crate) fn give_up(&self) {
        let Self(()) = self;
    }
}
