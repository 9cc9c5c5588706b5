//! The state of a rank, as the judge sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use super::Issued;
use crate::engine::Key;
use crate::{Descriptor, GroupId};

/// The state of a rank at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankState {
    /// Its step.
    pub(crate) step: u64,
    /// Its epoch, and whether the rank knows that it was given up.
    pub(crate) epoch: u64,
    pub(crate) given_up: bool,
    pub(crate) has_left: bool,
    /// The operation that it issued last.
    pub(crate) last: Option<Arc<Descriptor>>,
    /// Its operations, by group. Empty between threads: there a rank that is missed has not come.
    pub(crate) issued: Issued,
    /// Its calls of NCCL, by group.
    pub(crate) rolled: BTreeMap<GroupId, Rolled>,
    /// Its waits, one for each thread that waits.
    pub(crate) waits: Vec<Wait>,
}

/// The calls of NCCL of a rank on one group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rolled {
    /// The number of calls.
    pub(crate) count: u64,
    /// The hash after a call, by the call's index: those that were asked for, and the last.
    pub(crate) hashes: BTreeMap<u64, u128>,
    /// The call that was asked for.
    pub(crate) entry: Option<Arc<Descriptor>>,
    /// The last call that the rank can describe, where one was asked for.
    pub(crate) last: Option<Arc<Descriptor>>,
}

/// The cause for which a thread of a rank waits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Wait {
    /// Other members of an operation.
    Members(MemberWait),
    /// The work of an operation, which reads a gradient of this rank, or of none.
    Work(Option<Rank>),
}

/// A wait for members.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MemberWait {
    pub(crate) operation: Arc<Descriptor>,
    /// The index of the call among those of the group, if a device waits for NCCL.
    pub(crate) index: Option<u64>,
    /// Members of which nothing has come.
    pub(crate) missing: Vec<Rank>,
    /// Whether the only thread waits that has ever issued for the rank.
    pub(crate) is_of_issuer: bool,
}

/// The identity of a rank's wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct WaitKey {
    operation: Key,
    /// The index of the call among those of the group, if a device waits for NCCL.
    index: Option<u64>,
}

impl RankState {
    /// Its waits for members.
    pub(super) fn members(&self) -> impl Iterator<Item = &MemberWait> {
        self.waits.iter().filter_map(Wait::members)
    }

    /// Whether only ranks that it misses can end this wait, and no end of its epoch.
    pub(super) fn may_wait(&self, wait: &MemberWait) -> bool {
        !self.has_left && !self.given_up && wait.operation.epoch == self.epoch
    }

    /// Whether both are in one epoch, which neither gives up.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        self.epoch == other.epoch && !self.given_up && !other.given_up
    }

    pub(super) fn has_issued(&self, wait: &MemberWait) -> bool {
        match wait.index {
            None => self.issued.has(&wait.operation),
            Some(index) => {
                let rolled = self.rolled.get(&wait.operation.group);
                rolled.is_some_and(|rolled| index < rolled.count)
            }
        }
    }
}

impl Wait {
    pub(crate) fn members(&self) -> Option<&MemberWait> {
        match self {
            Self::Members(members) => Some(members),
            Self::Work(_) => None,
        }
    }

    pub(super) fn missing(&self) -> &[Rank] {
        self.members().map_or(&[], |members| &members.missing)
    }
}

impl MemberWait {
    pub(crate) fn key(&self) -> WaitKey {
        WaitKey::new(&self.operation, self.index)
    }

    /// Whether both are one wait.
    pub(super) fn is_as(&self, other: &Self) -> bool {
        self.is_of_issuer == other.is_of_issuer && self.key() == other.key()
    }
}

impl WaitKey {
    /// A wait for an operation, or for its call of NCCL with this index.
    pub(crate) fn new(operation: &Descriptor, index: Option<u64>) -> Self {
        Self { operation: operation.into(), index }
    }
}
