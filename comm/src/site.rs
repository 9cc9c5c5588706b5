//! Where the members of a call meet. PROTOCOL.md, "Matching of calls".

use std::sync::Arc;

use hsdp_sharding::Rank;

use crate::handle::RankHandle;
use crate::sequence::Sequence;
use crate::{Channel, GroupId};

/// Where the members of a call meet: a group, what is left of one whose other members are absent, or a pair of its
/// members.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) id: GroupId,
    pub(crate) channel: Channel,
    /// The members, by slot.
    pub(crate) ranks: Arc<[Rank]>,
    /// This rank's.
    pub(crate) slot: usize,
    pub(crate) sequence: Arc<Sequence>,
}

impl Site {
    /// A group of `ranks`, of which this rank is the one in `slot`.
    pub(crate) fn group(
        handle: &RankHandle,
        ranks: Arc<[Rank]>,
        channel: Channel,
        slot: usize,
    ) -> Self {
        let id = GroupId::of(&ranks, channel);
        Self::at(handle, id, channel, ranks, slot)
    }

    /// What is left of a group without `absent`, of which this rank is none: a group of its own, which pairs with no other.
    pub(crate) fn without(&self, handle: &RankHandle, absent: &[Rank]) -> Self {
        let id = self.id.without(absent);
        let is_present = |rank: &&Rank| !absent.contains(rank);
        let ranks: Arc<[Rank]> = self.ranks.iter().filter(is_present).copied().collect();
        let before = self.ranks[..self.slot].iter().filter(is_present);
        let slot = before.count();
        Self::at(handle, id, self.channel, ranks, slot)
    }

    /// The transfers from one member to another: the first gives, the second takes.
    pub(crate) fn pair(&self, handle: &RankHandle, [from, to]: [Rank; 2], slot: usize) -> Self {
        let id = self.id.pair(from, to);
        Self::at(handle, id, self.channel, Arc::new([from, to]), slot)
    }

    fn at(
        handle: &RankHandle,
        id: GroupId,
        channel: Channel,
        ranks: Arc<[Rank]>,
        slot: usize,
    ) -> Self {
        let sequence = handle.sequence(id, channel, &ranks, slot);
        Self { id, channel, ranks, slot, sequence }
    }
}
