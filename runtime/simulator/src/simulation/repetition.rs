//! Microbatches that repeat: one that leaves the state of the one before, later by the same time on all ranks, need not be simulated again.

use super::actions::Ranks;
use super::shares::Shares;
use crate::Time;

/// The state of all ranks after a microbatch.
pub(super) struct Repetition {
    /// The time of the first rank's computation.
    base: Time,
    /// By rank: the time of its thread, and that of its computation.
    ranks: Vec<(Time, Time)>,
    /// By rank: the times of its computation and its streams, less the base. A time before that of computation is the latter: no operation
    /// begins before it. Exchanges begin after the thread's time instead, and count from there.
    relative: Vec<i64>,
    shares: Vec<Shares>,
}

impl Repetition {
    pub(super) fn of(ranks: &Ranks) -> Self {
        let base = ranks.of[0].computation;
        let mut relative = Vec::new();
        for (color, rank) in ranks.of.iter().enumerate() {
            let at_least = |time: Time| since(time.max(rank.computation), base);
            let [exchanges, streams @ ..] = ranks.streams.free(color);
            relative.extend([at_least(Time::ZERO), since(exchanges.max(rank.host), rank.host)]);
            relative.extend(streams.map(at_least));
            relative.extend(rank.earlier.iter().map(|(_, times)| at_least(times.ends)));
        }
        let of = ranks.of.iter();
        let (shares, ranks) = of.map(|it| (it.shares, (it.host, it.computation))).unzip();
        Self { base, ranks, relative, shares }
    }

    /// Whether each microbatch after `next`, which follows this state, passes as the one between them.
    pub(super) fn repeats(&self, next: &Self) -> bool {
        let mut threads = self.ranks.iter().zip(&next.ranks);
        self.relative == next.relative && threads.all(|(before, after)| stays(*before, *after))
    }
}

/// Whether a rank's thread is as far behind or ahead of its computation as before; or so far ahead that a whole microbatch of launches ends
/// before the computation that was launched before it, and not less far than it was.
fn stays(before: (Time, Time), after: (Time, Time)) -> bool {
    let [(host, computation), next] = [before, after];
    let (ahead, ahead_next) = (since(computation, host), since(next.1, next.0));
    ahead == ahead_next || (ahead_next > ahead && ahead >= since(next.0, host))
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
            let of_thread = rank.host.saturating_sub(before.ranks[color].0) * times;
            rank.host += of_thread;
            rank.computation += passed;
            rank.earlier.iter_mut().for_each(|(_, times)| times.advance(passed));
            rank.shares = rank.shares + after.shares[color].since(&before.shares[color]) * times;
            self.streams.advance(color, [of_thread, passed]);
        }
    }
}
