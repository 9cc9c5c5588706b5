//! Microbatches that repeat: if one leaves the state of the one before, only later, those that
//! follow need not be simulated.
//!
//! Ranks depend on each other only through the operations in which they meet. So a block divides
//! the colors into components that have no operation in common, and each component passes as if it
//! were alone: also where all colors are parked, since the color that then goes on without an
//! operation is the first in time of its component as well. All that a color does is a sum, a
//! maximum or a comparison of times. So a component that begins a microbatch in the state of the
//! one before, later by some time, does the same in it, later by that time: a component has a base,
//! and its state is its times less that base. Each component is later by a time of its own, until a
//! block has operations in which they meet.
//!
//! The state of a color has all times that a block reads:
//!
//! - Its computation, its thread, and the ends of its streams. Queues of streams are empty between
//!   blocks.
//! - Of each reduce-scatter of the microbatch before, all times: a wait for it is divided into
//!   shares by them.
//!
//! Some times count as another one that is later. Operations begin after the computation before
//! them, and waits end after it, so times before that of computation count as the latter. Exchanges
//! begin after the thread's time instead. Shares are only added to.
//!
//! A device's thread that runs ahead of it ever further never has the same state. It need not have:
//! let the thread be ahead by more than the time for which it works in a microbatch, and not less
//! far after it. Through this microbatch it stays before the computation. So it decides no maximum,
//! and does not read what the device has computed, which would bring it to the computation's time.
//! If it also takes part in no exchange, it only adds the same launches, and computation passes as
//! if there were no thread. All this holds for the next microbatch, too.
//!
//! Any other pattern, such as microbatches that repeat the one before the last, is simulated one by
//! one.

use std::collections::BTreeSet;

use hsdp_flight::Channel;

use super::Shares;
use super::actions::{ColorRanks, ColorState};
use super::colors::Colors;
use crate::Time;
use crate::host::{Action, StepBlock};

/// How colors depend on each other in a block.
pub(super) struct Dependence {
    /// First color of each color's component.
    component: Vec<usize>,
    /// Whether times of threads matter beside those of computation.
    uses_threads: bool,
}

impl Dependence {
    /// Finds the dependence in a block, which each color has in its own form.
    pub(super) fn of(colors: &Colors, blocks: &[&StepBlock]) -> Self {
        let of_color = |(color, block): (usize, &&StepBlock)| {
            let members: BTreeSet<_> = block.operations.iter().map(|it| it.members).collect();
            members.into_iter().map(move |it| colors.group(color, it)).collect::<Vec<_>>()
        };
        let groups: BTreeSet<usize> = blocks.iter().enumerate().flat_map(of_color).collect();
        let mut component: Vec<usize> = (0..blocks.len()).collect();
        for group in groups {
            let members = &colors.class(group).colors;
            for pair in members.windows(2) {
                let [one, other] = [pair[0], pair[1]].map(|color| first(&mut component, color));
                component[one.max(other)] = one.min(other);
            }
        }
        for color in 0..component.len() {
            component[color] = first(&mut component, color);
        }
        let uses_threads = |block: &&StepBlock| {
            block.operations.iter().any(|it| it.channel == Channel::Control)
                || block.actions.contains(&Action::IssueReady)
        };
        Self { component, uses_threads: blocks.iter().any(uses_threads) }
    }
}

/// Returns the first color of a component: colors lead to lower ones of their component, and the
/// first to itself.
fn first(component: &mut [usize], mut color: usize) -> usize {
    while component[color] != color {
        component[color] = component[component[color]];
        color = component[color];
    }
    color
}

/// The state of all colors after a microbatch.
pub(super) struct Repetition<'a> {
    dependence: &'a Dependence,
    of: Vec<RepeatedState>,
}

/// The state of a color.
struct RepeatedState {
    /// The time of computation of its component's first color.
    base: Time,
    host: Time,
    computation: Time,
    /// The times of its computation, its streams and the reduce-scatters before, less the base.
    relative: Vec<i64>,
    /// Times of its thread and of its exchanges, less the base.
    thread: [i64; 2],
    shares: Shares,
}

impl RepeatedState {
    fn of(ranks: &ColorRanks, color: usize, base: Time) -> Self {
        let ColorState { host, computation, ref earlier, shares } = ranks.of[color];
        let [exchanges, streams @ ..] = ranks.streams.free(color);
        let earlier = earlier.iter().flat_map(|(_, times)| [times.could, times.begins, times.ends]);
        let all = std::iter::once(computation).chain(streams).chain(earlier);
        let relative = all.map(|time| since(time.max(computation), base)).collect();
        let thread = [host, exchanges.max(host)].map(|time| since(time, base));
        Self { base, host, computation, relative, thread, shares }
    }

    /// Returns whether the thread stays before the computation in the microbatch up to `next`, and
    /// in each that follows.
    fn runs_ahead(&self, next: &Self) -> bool {
        let [ahead, ahead_next] = [self, next].map(|it| since(it.computation, it.host));
        let has_exchanged = self.thread[0] == self.thread[1];
        has_exchanged && ahead > since(next.host, self.host) && ahead_next >= ahead
    }
}

impl<'a> Repetition<'a> {
    pub(super) fn of(ranks: &ColorRanks, dependence: &'a Dependence) -> Self {
        let base = |color: usize| ranks.of[dependence.component[color]].computation;
        let of = (0..ranks.of.len()).map(|color| RepeatedState::of(ranks, color, base(color)));
        Self { dependence, of: of.collect() }
    }

    /// Returns whether each microbatch after `next`, which follows this state, passes as the one
    /// between them.
    pub(super) fn repeats(&self, next: &Self) -> bool {
        let may_run_ahead = !self.dependence.uses_threads;
        self.of.iter().zip(&next.of).all(|(before, after)| {
            let is_same = before.thread == after.thread;
            before.relative == after.relative
                && (is_same || (may_run_ahead && before.runs_ahead(after)))
        })
    }
}

#[expect(clippy::cast_possible_wrap, reason = "a difference of saturating times wraps to its sign")]
const fn since(time: Time, base: Time) -> i64 {
    time.picoseconds().wrapping_sub(base.picoseconds()) as i64
}

impl ColorRanks {
    /// Repeats the microbatch between two states so many times.
    pub(super) fn skip(&mut self, before: &Repetition<'_>, after: &Repetition<'_>, times: u64) {
        let states = before.of.iter().zip(&after.of);
        for (color, (rank, (before, after))) in self.of.iter_mut().zip(states).enumerate() {
            let passed = after.base.saturating_sub(before.base) * times;
            let of_thread = after.host.saturating_sub(before.host) * times;
            rank.host += of_thread;
            rank.computation += passed;
            rank.earlier.iter_mut().for_each(|(_, times)| times.advance(passed));
            rank.shares = rank.shares + after.shares.since(&before.shares) * times;
            self.streams.advance(color, [of_thread, passed]);
        }
    }
}
