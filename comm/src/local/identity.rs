//! Which operation it is, and whose.

use std::sync::Arc;

use hsdp_sharding::Rank;

use crate::flight::Origin;
use crate::{Descriptor, GroupId};

/// What tells one operation from all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) group: GroupId,
    pub(crate) number: Number,
}

/// What tells it from the others of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Number {
    pub(crate) epoch: u64,
    pub(crate) sequence: u64,
}

/// Who takes part in the operations of a group: the same in all of them.
#[derive(Debug)]
pub(crate) struct Company {
    pub(crate) group: GroupId,
    /// The members, by slot.
    pub(crate) ranks: Arc<[Rank]>,
    /// From when their time counts.
    pub(crate) origin: Origin,
}

impl From<&Descriptor> for Key {
    fn from(descriptor: &Descriptor) -> Self {
        Self { group: descriptor.group, number: descriptor.into() }
    }
}

impl From<&Descriptor> for Number {
    fn from(descriptor: &Descriptor) -> Self {
        let Descriptor { epoch, sequence, .. } = *descriptor;
        Self { epoch, sequence }
    }
}
