//! The contributions of other ranks to exchanges, which this rank sends on together. `REMOTE.md`, "Exchanges".

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, mem};

use hsdp_sharding::Rank;

use super::transmit::Payload;
use super::tree::Tree;
use crate::Descriptor;

/// How long contributions wait for those that are missing. Then they are sent on without them, so that each rank knows which ranks
/// are missing.
const FORWARD_AFTER: Duration = Duration::from_millis(100);

/// The place of an exchange in the sequence of its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ExchangeKey {
    pub(super) epoch: u64,
    pub(super) number: u64,
}

impl From<&Descriptor> for ExchangeKey {
    fn from(descriptor: &Descriptor) -> Self {
        Self { epoch: descriptor.epoch, number: descriptor.sequence }
    }
}

impl fmt::Display for ExchangeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of epoch {}", self.number, self.epoch)
    }
}

/// One rank's message to all others.
#[derive(Clone, Debug)]
pub(super) struct Forwarded {
    pub(super) rank: Rank,
    pub(super) header: Arc<[u8]>,
    pub(super) payload: Payload,
}

/// Contributions to one exchange that are sent together.
#[derive(Debug)]
#[cfg_attr(test, derive(PartialEq))]
pub(super) struct ExchangeBatch {
    pub(super) key: ExchangeKey,
    pub(super) contributions: Vec<Forwarded>,
}

/// The contributions that this rank holds.
#[derive(Debug)]
pub(super) struct Exchanges {
    pub(super) tree: Tree,
    /// The number of ranks whose contributions this one sends on.
    subtree: usize,
    held: BTreeMap<ExchangeKey, Held>,
    /// Of exchanges that are not complete on this rank: by rank, whether its contribution is known here.
    attendance: BTreeMap<ExchangeKey, Vec<bool>>,
}

#[derive(Debug)]
struct Held {
    since: Instant,
    contributions: Vec<Forwarded>,
    /// The ranks of those, and of those that were sent on.
    ranks: BTreeSet<Rank>,
}

impl Exchanges {
    pub(super) fn new(tree: Tree) -> Self {
        let subtree = tree.subtree();
        let held = BTreeMap::new();
        Self { tree, subtree, held, attendance: BTreeMap::new() }
    }

    /// This rank contributes.
    pub(super) fn contribute(&mut self, key: ExchangeKey) {
        // Exchanges of epochs before the last one never complete.
        self.attendance.retain(|other, _| other.epoch.saturating_add(1) >= key.epoch);
        self.attend(key, [self.tree.rank]);
    }

    /// Whether this rank has got all contributions to an exchange, and given its own.
    pub(super) fn is_complete(&self, key: ExchangeKey) -> bool {
        !self.attendance.contains_key(&key)
    }

    /// Whether contributions of this rank or of those below are missing.
    pub(super) fn is_held(&self, key: ExchangeKey) -> bool {
        self.held.contains_key(&key)
    }

    /// Whether a rank has contributed to an exchange that this rank has not forgotten.
    pub(super) fn has(&self, key: ExchangeKey, rank: Rank) -> bool {
        self.held.get(&key).is_some_and(|held| held.ranks.contains(&rank))
    }

    /// This rank has given its contribution, or got those of others: maybe before its own. An exchange that is complete is forgotten.
    pub(super) fn attend(&mut self, key: ExchangeKey, ranks: impl IntoIterator<Item = Rank>) {
        let none = || vec![false; self.tree.size];
        let attendance = self.attendance.entry(key).or_insert_with(none);
        ranks.into_iter().for_each(|rank| attendance[rank.index()] = true);
        if attendance.iter().all(|is_there| *is_there) {
            self.attendance.remove(&key);
        }
    }

    /// Takes contributions of this rank, or of ranks below it, that it does not [have](Self::has). Returns those that are to be sent on: all
    /// contributions to an earlier exchange, so that those of one rank stay in order; and those to this one, if none is missing.
    pub(super) fn take(
        &mut self,
        ExchangeBatch { key, contributions }: ExchangeBatch,
        now: Instant,
    ) -> Vec<ExchangeBatch> {
        let earlier = self.held.range_mut(..key);
        let mut ready: Vec<_> = earlier.filter_map(|(key, held)| held.send(*key)).collect();
        let none = || Held { since: now, contributions: Vec::new(), ranks: BTreeSet::new() };
        let held = self.held.entry(key).or_insert_with(none);
        if held.contributions.is_empty() {
            held.since = now;
        }
        held.ranks.extend(contributions.iter().map(|it| it.rank));
        held.contributions.extend(contributions);
        if held.ranks.len() == self.subtree {
            ready.extend(held.send(key));
        }
        // An exchange of an earlier epoch never completes.
        let subtree = self.subtree;
        self.held.retain(|other, held| {
            *other > key || (other.epoch == key.epoch && held.ranks.len() < subtree)
        });
        ready
    }

    /// The contributions that have waited for long enough.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<ExchangeBatch> {
        let overdue = |held: &Held| now.saturating_duration_since(held.since) >= FORWARD_AFTER;
        let waited = self.held.iter_mut().filter(|(_, held)| overdue(held));
        waited.filter_map(|(key, held)| held.send(*key)).collect()
    }

    /// Whether contributions are held.
    pub(super) fn holds(&self) -> bool {
        self.held.values().any(|held| !held.contributions.is_empty())
    }

    /// Whether other ranks depend on this one to get contributions. An exchange never completes without a rank that has left, or has stopped in its
    /// epoch: one that `is_out`.
    pub(super) fn owes(&self, is_out: impl Fn(Rank, u64) -> bool) -> bool {
        let comes = |(key, is_there): (&ExchangeKey, &Vec<bool>)| {
            let mut missing = self.tree.others().filter(|rank| !is_there[rank.index()]);
            is_there[self.tree.rank.index()] && !missing.any(|rank| is_out(rank, key.epoch))
        };
        let is_relay = self.tree.children().next().is_some();
        self.holds() || (is_relay && self.attendance.iter().any(comes))
    }

    pub(super) fn clear(&mut self) {
        self.held.clear();
        self.attendance.clear();
    }
}

impl Held {
    /// The contributions that were not sent on.
    fn send(&mut self, key: ExchangeKey) -> Option<ExchangeBatch> {
        let contributions = mem::take(&mut self.contributions);
        (!contributions.is_empty()).then_some(ExchangeBatch { key, contributions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::message::{MessageKind, RankMessage};

    impl PartialEq for Forwarded {
        fn eq(&self, other: &Self) -> bool {
            let of = |it: &Self| (it.rank, Arc::clone(&it.header), it.payload.bytes().to_vec());
            of(self) == of(other)
        }
    }

    fn batch(number: u64, ranks: &[usize]) -> ExchangeBatch {
        let contribution = |rank: &usize| {
            let message = RankMessage::write(&Arc::default(), MessageKind::Data, 0, b"", 8);
            let payload = Payload::whole(message.expect("there is memory"));
            Forwarded { rank: Rank::new(*rank), header: b"to all".as_slice().into(), payload }
        };
        let contributions = ranks.iter().map(contribution).collect();
        ExchangeBatch { key: ExchangeKey { epoch: 0, number }, contributions }
    }

    fn root(size: usize) -> Exchanges {
        Exchanges::new(Tree::new(Rank::new(0), size))
    }

    #[test]
    fn contributions_are_sent_on_together() {
        let mut exchanges = root(3);
        let now = Instant::now();
        assert_eq!(exchanges.take(batch(0, &[2]), now), []);
        assert_eq!(exchanges.take(batch(0, &[0]), now), []);
        assert!(exchanges.holds());
        assert_eq!(exchanges.take(batch(0, &[1]), now), [batch(0, &[2, 0, 1])]);
        assert!(!exchanges.holds() && exchanges.held.is_empty());
    }

    #[test]
    fn contributions_wait_for_a_moment_only() {
        let mut exchanges = root(3);
        let now = Instant::now();
        exchanges.take(batch(0, &[2]), now);
        assert_eq!(exchanges.overdue(now + FORWARD_AFTER / 2), []);
        assert_eq!(exchanges.overdue(now + FORWARD_AFTER), [batch(0, &[2])]);
        assert_eq!(exchanges.overdue(now + 2 * FORWARD_AFTER), [], "they are sent once");
        // The others are complete with those that were sent.
        assert_eq!(exchanges.take(batch(0, &[0]), now + 3 * FORWARD_AFTER), []);
        let rest = exchanges.take(batch(0, &[1]), now + 3 * FORWARD_AFTER);
        assert_eq!(rest, [batch(0, &[0, 1])]);
        assert!(exchanges.held.is_empty());
    }

    #[test]
    fn contributions_of_one_rank_stay_in_order() {
        let mut exchanges = root(3);
        let now = Instant::now();
        exchanges.take(batch(0, &[1]), now);
        assert_eq!(exchanges.take(batch(1, &[1]), now), [batch(0, &[1])]);
        assert_eq!(exchanges.overdue(now + FORWARD_AFTER), [batch(1, &[1])]);
    }

    #[test]
    fn contributions_that_come_before_the_own_one_count() {
        let mut exchanges = root(3);
        let key = batch(4, &[]).key;
        exchanges.attend(key, [Rank::new(1)]);
        assert!(!owes(&exchanges), "this rank may never contribute");
        exchanges.contribute(key);
        assert!(owes(&exchanges));
        exchanges.attend(key, [Rank::new(2)]);
        assert!(!owes(&exchanges) && exchanges.attendance.is_empty());
    }

    fn owes(exchanges: &Exchanges) -> bool {
        exchanges.owes(|_, _| false)
    }

    #[test]
    fn a_rank_that_others_send_through_owes_until_it_has_got_all() {
        let mut exchanges = root(3);
        let key = batch(4, &[]).key;
        exchanges.contribute(key);
        assert!(owes(&exchanges));
        exchanges.attend(key, [Rank::new(1)]);
        assert!(owes(&exchanges));
        assert!(!exchanges.owes(|rank, epoch| (rank.index(), epoch) == (2, 0)), "one never comes");
        assert!(exchanges.owes(|rank, epoch| (rank.index(), epoch) == (2, 1)), "it is in time");
        assert!(exchanges.owes(|rank, _| rank == Rank::new(1)), "this one has come");
        let mut leaf = Exchanges::new(Tree::new(Rank::new(2), 3));
        leaf.contribute(key);
        assert!(!owes(&leaf), "no rank sends through it");
    }
}
