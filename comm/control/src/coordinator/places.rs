//! The coordinator's record of each rank.

use std::time::Instant;

use hsdp_sharding::Rank;

use crate::{Member, State};

/// A rank that a process has, or had.
#[derive(Debug)]
pub(super) struct RankPlace {
    member: Member,
    pub(super) state: State,
    /// The time of the last message.
    pub(super) heard: Instant,
}

/// The ranks of a world; `None` where no process has joined.
#[derive(Debug)]
pub(super) struct Places(Vec<Option<RankPlace>>);

impl Places {
    pub(super) fn new(world: u32) -> Self {
        Self((0..world).map(|_| None).collect())
    }

    pub(super) fn take(&mut self, member: Member, now: Instant) {
        let rank = member.rank;
        self.0[rank.index()] = Some(RankPlace { member, state: State::Alive, heard: now });
    }

    pub(super) fn free(&mut self, rank: Rank) {
        self.0[rank.index()] = None;
    }

    /// The process that has a rank, or had it.
    pub(super) fn holder(&self, rank: Rank) -> Option<&Member> {
        self.0.get(rank.index())?.as_ref().map(|place| &place.member)
    }

    /// Ranks that no process has, or had.
    pub(super) fn missing(&self) -> Vec<Rank> {
        (0..self.0.len()).map(Rank::new).filter(|rank| self.holder(*rank).is_none()).collect()
    }

    /// The ranks that are alive.
    pub(super) fn there(&self) -> Vec<Rank> {
        self.heard(|_| true)
    }

    /// The place of a rank that is alive.
    pub(super) fn alive(&mut self, rank: Rank) -> Option<&mut RankPlace> {
        self.0.get_mut(rank.index())?.as_mut().filter(|place| place.state == State::Alive)
    }

    /// Lets the silence of all members count from now on.
    pub(super) fn hear_all(&mut self, now: Instant) {
        self.0.iter_mut().flatten().for_each(|place| place.heard = now);
    }

    /// The ranks that are alive and have been heard at a time for which `is` holds.
    pub(super) fn heard(&self, is: impl Fn(Instant) -> bool) -> Vec<Rank> {
        let alive = self.0.iter().flatten().filter(|place| place.state == State::Alive);
        alive.filter(|place| is(place.heard)).map(|place| place.member.rank).collect()
    }
}
