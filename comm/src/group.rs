//! An ordered set of ranks that issue operations together.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use hsdp_kernels::Element;
use hsdp_sharding::{DType, Rank};

use crate::handle::RankHandle;
use crate::site::Site;
use crate::{CallError, Channel, Error, GroupId, Op, Tag};

/// An ordered set of ranks, on one channel, and this rank's place in it.
///
/// Every member issues the same operations in the same order: the n-th call of one member meets the
/// n-th call of the others. A call returns a [`Pending`](crate::Pending) at once, and never waits
/// for another member. Several threads of a rank may use handles of one group, if the caller keeps
/// their calls in order.
#[derive(Clone)]
pub struct Group {
    handle: Arc<RankHandle>,
    site: Site,
}

impl Group {
    pub(crate) fn new(
        handle: &Arc<RankHandle>,
        ranks: &[Rank],
        channel: Channel,
    ) -> Result<Self, Error> {
        let refuse = |problem| {
            Error::Call(CallError::BadGroup {
                rank: handle.own.rank,
                size: handle.size,
                ranks: ranks.iter().map(|rank| rank.get()).collect(),
                problem,
            })
        };
        if ranks.iter().any(|rank| rank.index() >= handle.size) {
            return Err(refuse("a member is not in the world"));
        }
        let mut seen = HashSet::with_capacity(ranks.len());
        if !ranks.iter().all(|rank| seen.insert(*rank)) {
            return Err(refuse("a member is listed twice"));
        }
        let index = ranks.iter().position(|rank| *rank == handle.own.rank);
        let index = index.ok_or_else(|| refuse("this rank is not among its members"))?;
        Ok(Self {
            handle: Arc::clone(handle),
            site: handle.site(GroupId::of(ranks, channel), channel, ranks.into(), index),
        })
    }

    pub(crate) fn of_all(handle: &Arc<RankHandle>, channel: Channel) -> Self {
        let ranks: Arc<[Rank]> = (0..handle.size).map(Rank::new).collect();
        let id = GroupId::of(&ranks, channel);
        let site = handle.site(id, channel, ranks, handle.own.rank.index());
        Self { handle: Arc::clone(handle), site }
    }

    pub(crate) fn handle(&self) -> &Arc<RankHandle> {
        &self.handle
    }

    pub(crate) fn site(&self) -> &Site {
        &self.site
    }

    /// For hsdp: the group of the same ranks and channel for a model of the world, with a sequence
    /// of operations of its own. The first model has this group itself.
    #[doc(hidden)]
    #[must_use]
    pub fn of_model(&self, number: u32) -> Self {
        let Site { id, channel, ref ranks, slot, .. } = self.site;
        let site = self.handle.site(id.of_model(number), channel, Arc::clone(ranks), slot);
        Self { handle: Arc::clone(&self.handle), site }
    }

    /// The site of the members that are left without `absent`, of which this rank is none: a group
    /// of its own, which pairs with no other.
    pub(crate) fn without(&self, absent: &[Rank]) -> Site {
        let Site { id, channel, ref ranks, slot, .. } = self.site;
        let is_present = |rank: &&Rank| !absent.contains(rank);
        let before = ranks[..slot].iter().filter(is_present).count();
        let present = ranks.iter().filter(is_present).copied().collect();
        self.handle.site(id.without(absent), channel, present, before)
    }

    /// The site of the transfers from one member to another: the first gives, the second takes.
    pub(crate) fn pair(&self, [from, to]: [Rank; 2], slot: usize) -> Site {
        let Site { id, channel, .. } = self.site;
        self.handle.site(id.pair(from, to), channel, Arc::new([from, to]), slot)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.handle.own.rank
    }

    /// The members, in order.
    #[must_use]
    pub fn ranks(&self) -> &[Rank] {
        &self.site.ranks
    }

    /// The number of members.
    #[must_use]
    pub fn size(&self) -> usize {
        self.site.ranks.len()
    }

    /// The index of this rank in [`ranks`](Self::ranks): its slot in the group's operations.
    #[must_use]
    pub fn index(&self) -> usize {
        self.site.slot
    }

    /// The channel.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.site.channel
    }

    /// The identity of the group, the same on all members.
    #[must_use]
    pub fn id(&self) -> GroupId {
        self.site.id
    }

    /// The rank of a member.
    ///
    /// # Errors
    /// [`CallError::Refused`] if there is no such member.
    pub(crate) fn member(&self, op: Op, what: &str, index: usize) -> Result<Rank, Error> {
        let member = self.site.ranks.get(index).copied();
        let members = self.size();
        let problem = || format!("{what} is member {index}, but the group has {members} members");
        member.ok_or_else(|| self.refused(op, problem()))
    }

    pub(crate) fn refused(&self, op: Op, problem: String) -> Error {
        CallError::Refused { op, rank: self.rank(), problem }.into()
    }

    pub(crate) fn bad_count(
        &self,
        op: Op,
        what: &str,
        found: usize,
        expected: impl fmt::Display,
    ) -> Error {
        self.refused(op, format!("{what} has {found} elements, expected {expected}"))
    }

    pub(crate) fn bad_dtype(&self, op: Op, dtype: DType, problem: &str) -> Error {
        self.refused(op, format!("{dtype} elements: {problem}"))
    }

    /// A buffer for an output: pages that were never touched.
    pub(crate) fn room<T: Element>(&self, op: Op, tag: Tag, len: usize) -> Result<Vec<T>, Error> {
        let bytes = len.saturating_mul(size_of::<T>());
        let failed = |()| self.handle.out_of_memory(op, bytes, format!("its output, in {tag}"));
        bytemuck::allocation::try_zeroed_vec(len).map_err(failed)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank())
            .field("channel", &self.channel())
            .field("ranks", &self.ranks())
            .finish_non_exhaustive()
    }
}
