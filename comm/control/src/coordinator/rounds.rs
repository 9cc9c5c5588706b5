//! Exchanges and broadcasts in progress.
//!
//! CONTROL.md, "Rounds".

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use prost::bytes::Bytes;

use super::{Letter, numbers};
use crate::Terms;
use crate::limits::MOST_ROUNDS;
use crate::wire::{
    Failure, FromCoordinator, Give, Givers, Grounds, Lateness, Mixture, Overflow, RoundFailed,
    RoundKind, Value,
};

/// A member joins a round twice.
#[derive(Debug, thiserror::Error)]
#[error("it joined one round twice")]
pub(super) struct Again;

/// One use of a key.
#[derive(Debug)]
struct Round {
    since: Instant,
    came: BTreeMap<Rank, Part>,
    failed: Option<Failure>,
}

#[derive(Debug)]
struct Part {
    kind: RoundKind,
    value: Option<Bytes>,
}

/// The rounds that are in progress or have failed, by key.
#[derive(Debug)]
pub(super) struct Rounds {
    open: BTreeMap<String, Round>,
    most: Duration,
}

impl Rounds {
    pub(super) fn new(most: Duration) -> Self {
        Self { open: BTreeMap::new(), most }
    }

    /// A member joins a round. If it is the last, the round is complete.
    pub(super) fn give(
        &mut self,
        rank: Rank,
        give: Give,
        terms: &Terms,
        now: Instant,
    ) -> Result<Vec<Letter>, Again> {
        let Give { key, kind, value } = give;
        if self.open.len() >= MOST_ROUNDS && !self.open.contains_key(&key) {
            let most = u32::try_from(MOST_ROUNDS).unwrap_or(u32::MAX);
            return Ok(vec![failed(rank, &key, &Grounds::Crowded(Overflow { most }).into())]);
        }
        let new = || Round { since: now, came: BTreeMap::new(), failed: None };
        let round = self.open.entry(key.clone()).or_insert_with(new);
        let kind = RoundKind::try_from(kind).unwrap_or(RoundKind::Exchange);
        let again = round.came.insert(rank, Part { kind, value }).is_some();
        if let Some(failure) = &round.failed {
            return Ok(vec![failed(rank, &key, failure)]);
        }
        if again {
            return Err(Again);
        }
        if let Some(mixture) = round.mixture() {
            return Ok(round.fail(&key, &mixture));
        }
        if round.came.len() < terms.world() as usize {
            return Ok(Vec::new());
        }
        Ok(self.complete(&key, terms))
    }

    /// Fails the rounds whose deadline has passed.
    pub(super) fn expire(&mut self, terms: &Terms, now: Instant) -> Vec<Letter> {
        let most = self.most;
        let late = self.open.iter_mut().filter(|(_, round)| {
            round.failed.is_none() && now.saturating_duration_since(round.since) >= most
        });
        late.flat_map(|(key, round)| {
            let lateness = round.lateness(most, terms);
            round.fail(key, &lateness)
        })
        .collect()
    }

    /// Fails all rounds that have not failed yet.
    pub(super) fn fail_all(&mut self, failure: &Failure) -> Vec<Letter> {
        let open = self.open.iter_mut().filter(|(_, round)| round.failed.is_none());
        open.flat_map(|(key, round)| round.fail(key, failure)).collect()
    }

    /// Forgets the failed rounds that all ranks of `there` have joined.
    pub(super) fn forget(&mut self, there: &[Rank]) {
        let waits_for = |round: &Round| there.iter().any(|rank| !round.came.contains_key(rank));
        self.open.retain(|_, round| round.failed.is_none() || waits_for(round));
    }

    pub(super) fn clear(&mut self) {
        self.open.clear();
    }

    /// Completes a round that all ranks have joined. The key is free again.
    fn complete(&mut self, key: &str, terms: &Terms) -> Vec<Letter> {
        let Some(mut round) = self.open.remove(key) else { return Vec::new() };
        let givers: Vec<Rank> = round.givers().collect();
        let broadcast = round.came.values().any(|part| part.kind == RoundKind::Broadcast);
        if broadcast && givers.len() != 1 {
            let ranks = numbers(&givers);
            return round.fail(key, &Grounds::Givers(Givers { ranks }).into());
        }
        let values: Vec<FromCoordinator> = round.values(key).collect();
        let to_one = |to: Rank| values.clone().into_iter().map(move |says| Letter { to, says });
        terms.ranks().flat_map(to_one).collect()
    }
}

impl Round {
    fn givers(&self) -> impl Iterator<Item = Rank> {
        self.came.iter().filter(|(_, part)| part.value.is_some()).map(|(rank, _)| *rank)
    }

    /// The values of the round. In an exchange, a rank without a value counts as one with no bytes.
    fn values(self, key: &str) -> impl Iterator<Item = FromCoordinator> {
        let broadcast = |part: &Part| part.kind == RoundKind::Broadcast;
        let given =
            self.came.into_iter().filter(move |(_, part)| part.value.is_some() || !broadcast(part));
        given.map(move |(rank, part)| {
            let value = part.value.unwrap_or_default();
            FromCoordinator::Value(Value { key: key.to_owned(), rank: rank.get(), value })
        })
    }

    /// Fails the round: tells the ranks that have joined, and keeps the failure for the others.
    fn fail(&mut self, key: &str, failure: &Failure) -> Vec<Letter> {
        self.failed = Some(failure.clone());
        self.came.values_mut().for_each(|part| part.value = None);
        self.came.keys().map(|&rank| failed(rank, key, failure)).collect()
    }

    fn mixture(&self) -> Option<Failure> {
        let who = |kind| {
            let of = self.came.iter().filter(move |(_, part)| part.kind == kind);
            of.map(|(rank, _)| rank.get()).collect::<Vec<_>>()
        };
        let (exchange, broadcast) = (who(RoundKind::Exchange), who(RoundKind::Broadcast));
        let mixed = !exchange.is_empty() && !broadcast.is_empty();
        mixed.then(|| Grounds::Mixed(Mixture { exchange, broadcast }).into())
    }

    fn lateness(&self, most: Duration, terms: &Terms) -> Failure {
        let missing = terms.ranks().filter(|rank| !self.came.contains_key(rank));
        let after = u64::try_from(most.as_millis()).unwrap_or(u64::MAX);
        let missing = missing.map(Rank::get).collect();
        let came = self.came.keys().map(|rank| rank.get()).collect();
        Grounds::Late(Lateness { after, missing, came }).into()
    }
}

fn failed(to: Rank, key: &str, failure: &Failure) -> Letter {
    let failure = Some(failure.clone());
    let says = FromCoordinator::RoundFailed(RoundFailed { key: key.to_owned(), failure });
    Letter { to, says }
}
