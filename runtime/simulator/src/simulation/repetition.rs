//! Microbatches that repeat: one that leaves the state of the one before, later by the same time on all ranks, need not be simulated again.

use super::actions::Ranks;
use super::shares::Shares;
use crate::Time;

/// The state of all ranks after a microbatch.
pub(super) struct Repetition {
    /// The time of the first rank's thread.
    base: Time,
    /// All other times, less the base. A time before the thread's own is that of the thread: nothing begins before it.
    relative: Vec<i64>,
    shares: Vec<Shares>,
}

impl Repetition {
    pub(super) fn of(ranks: &Ranks) -> Self {
        let base = ranks.of[0].host;
        let mut relative = Vec::new();
        for (color, rank) in ranks.of.iter().enumerate() {
            let at_least = |time: Time| since(time.max(rank.host), base);
            relative.extend([since(rank.host, base), since(rank.computation, base)]);
            relative.extend(ranks.streams.free(color).map(at_least));
            relative.extend(rank.earlier.iter().map(|times| at_least(times.ends)));
        }
        let shares = ranks.of.iter().map(|rank| rank.shares).collect();
        Self { base, relative, shares }
    }

    /// Whether the state is the same but for a time that has passed.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.relative == other.relative
    }
}

#[expect(clippy::cast_possible_wrap, reason = "a difference of saturating times wraps to its sign")]
const fn since(time: Time, base: Time) -> i64 {
    time.picoseconds().wrapping_sub(base.picoseconds()) as i64
}

impl Ranks {
    /// Repeats the microbatch between two states so many times.
    pub(super) fn skip(&mut self, before: &Repetition, after: &Repetition, times: u64) {
        let passed = after.base.saturating_sub(before.base) * times;
        for (color, rank) in self.of.iter_mut().enumerate() {
            rank.host += passed;
            rank.computation += passed;
            rank.earlier.iter_mut().for_each(|it| it.advance(passed));
            rank.shares = rank.shares + after.shares[color].since(&before.shares[color]) * times;
        }
        self.streams.advance(passed);
    }
}
