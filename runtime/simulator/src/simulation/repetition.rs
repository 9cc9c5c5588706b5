//! Microbatches that repeat: if one leaves the state of the one before, only later, those that
//! follow need not be simulated.
//!
//! Ranks depend on each other only through the operations in which they meet. So a block divides
//! the colors into components that have no operation in common, and each component passes as if it
//! were alone. All that a color does is a sum, a maximum or a comparison of times. So a component
//! that begins a microbatch in the state of the one before, later by some time, does the same in
//! it, later by that time: a component has a base, and its state is its times less that base. Each
//! component is later by a time of its own, until a block has operations in which they meet.
//!
//! The state of a color has all times that a block reads:
//!
//! - Its computation, its thread, and the ends of its streams. Queues of streams are empty between
//!   blocks.
//! - Of each reduce-scatter of the microbatch before, all times: a wait for it is divided into
//!   shares by them. A block that waits for gathers of slices does not repeat.
//!
//! Some times count as another one that is later. Operations begin after the computation before
//! them, and waits end after it, so times before that of computation count as the latter. Exchanges
//! begin after the thread's time instead. Shares are only added to.
//!
//! A device's thread reads the loss in each microbatch, so it cannot run ahead of its device ever
//! further. Any other pattern, such as microbatches that repeat the one before the last, is
//! simulated one by one.

use std::collections::BTreeSet;

use super::Shares;
use super::actions::{ColorRanks, ColorState};
use super::colors::Colors;
use crate::Time;
use crate::host::StepBlock;

/// Returns the first color of each color's component in a block.
pub(super) fn components(colors: &Colors, block: &StepBlock) -> Vec<usize> {
    let members: BTreeSet<_> = block.operations.iter().map(|it| it.members).collect();
    let groups = |color| members.iter().map(move |it| colors.group(color, *it));
    let groups: BTreeSet<usize> = (0..colors.len()).flat_map(groups).collect();
    let mut component: Vec<usize> = (0..colors.len()).collect();
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
    component
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
pub(super) struct Repetition {
    of: Vec<RepeatedState>,
}

/// The state of a color.
struct RepeatedState {
    /// The time of computation of its component's first color.
    base: Time,
    /// The times of its thread, its computation, its streams and the reduce-scatters before, less
    /// the base.
    relative: Vec<i64>,
    shares: Shares,
}

impl RepeatedState {
    fn of(ranks: &ColorRanks, color: usize, base: Time) -> Self {
        let ColorState { host, computation, ref earlier, shares, .. } = ranks.of[color];
        let [exchanges, streams @ ..] = ranks.streams.free(color);
        let earlier = earlier.iter().flat_map(|(_, times)| [times.could, times.begins, times.ends]);
        let others = streams.into_iter().chain(earlier).map(|time| time.max(computation));
        let all = [host, exchanges.max(host), computation].into_iter().chain(others);
        Self { base, relative: all.map(|time| since(time, base)).collect(), shares }
    }
}

impl Repetition {
    /// Returns the state of each color, relative to the computation of the first color of its
    /// component. `components` has that first color for each color.
    pub(super) fn of(ranks: &ColorRanks, components: &[usize]) -> Self {
        let state = |(color, first): (usize, &usize)| {
            RepeatedState::of(ranks, color, ranks.of[*first].computation)
        };
        Self { of: components.iter().enumerate().map(state).collect() }
    }

    /// Returns whether each microbatch after `next`, which follows this state, passes as the one
    /// between them.
    pub(super) fn repeats(&self, next: &Self) -> bool {
        self.of.iter().zip(&next.of).all(|(before, after)| before.relative == after.relative)
    }
}

#[expect(clippy::cast_possible_wrap, reason = "a difference of saturating times wraps to its sign")]
const fn since(time: Time, base: Time) -> i64 {
    time.picoseconds().wrapping_sub(base.picoseconds()) as i64
}

impl ColorRanks {
    /// Repeats the microbatch between two states so many times.
    pub(super) fn skip(&mut self, before: &Repetition, after: &Repetition, times: u64) {
        let states = before.of.iter().zip(&after.of);
        for (color, (rank, (before, after))) in self.of.iter_mut().zip(states).enumerate() {
            let passed = after.base.saturating_sub(before.base) * times;
            rank.host += passed;
            rank.computation += passed;
            rank.earlier.iter_mut().for_each(|(_, times)| times.advance(passed));
            rank.shares = rank.shares + after.shares.since(&before.shares) * times;
            self.streams.advance(color, passed);
        }
    }
}
