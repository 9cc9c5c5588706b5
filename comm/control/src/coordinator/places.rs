//! The coordinator's record of each rank.

use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use crate::Member;
use crate::wire::Standing;

/// A rank that a process has, or had.
#[derive(Debug)]
struct Place {
    member: Member,
    standing: Standing,
    heard: Instant,
}

/// The ranks of a world; `None` where no process has joined.
#[derive(Debug)]
pub(super) struct Places(Vec<Option<Place>>);

impl Places {
    pub(super) fn new(world: u32) -> Self {
        Self((0..world).map(|_| None).collect())
    }

    pub(super) fn take(&mut self, member: Member, now: Instant) {
        let rank = member.rank();
        let place = Place { member, standing: Standing::Alive, heard: now };
        self.0[rank.index()] = Some(place);
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
        (0..self.0.len()).map(Rank::new).filter(|rank| self.0[rank.index()].is_none()).collect()
    }

    /// The ranks that are alive or suspected.
    pub(super) fn there(&self) -> Vec<Rank> {
        self.which(Place::is_there)
    }

    pub(super) fn is_there(&self, rank: Rank) -> bool {
        self.0.get(rank.index()).and_then(Option::as_ref).is_some_and(Place::is_there)
    }

    /// Notes that a message of the member has arrived. Returns whether it had been suspected.
    pub(super) fn hear(&mut self, rank: Rank, now: Instant) -> bool {
        let Some(place) = &mut self.0[rank.index()] else { return false };
        place.heard = now;
        std::mem::replace(&mut place.standing, Standing::Alive) == Standing::Suspect
    }

    /// Lets the silence of all members count from now on.
    pub(super) fn hear_all(&mut self, now: Instant) {
        self.0.iter_mut().flatten().for_each(|place| place.heard = now);
    }

    pub(super) fn set(&mut self, rank: Rank, standing: Standing) {
        if let Some(place) = &mut self.0[rank.index()] {
            place.standing = standing;
        }
    }

    /// The ranks that are alive or suspected and have been silent for longer than `most`.
    pub(super) fn silent(&self, most: Duration, now: Instant) -> Vec<Rank> {
        self.which(|place| place.is_there() && place.silence(now) > most)
    }

    /// Marks the alive ranks that have been silent for longer than `most` as suspected, and returns them.
    pub(super) fn suspect(&mut self, most: Duration, now: Instant) -> Vec<Rank> {
        let is_new = |place: &Place| place.standing == Standing::Alive && place.silence(now) > most;
        let new = self.which(is_new);
        new.iter().for_each(|&rank| self.set(rank, Standing::Suspect));
        new
    }

    fn which(&self, is: impl Fn(&Place) -> bool) -> Vec<Rank> {
        self.0.iter().flatten().filter(|place| is(place)).map(|place| place.member.rank()).collect()
    }
}

impl Place {
    fn is_there(&self) -> bool {
        matches!(self.standing, Standing::Alive | Standing::Suspect)
    }

    fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard)
    }
}
