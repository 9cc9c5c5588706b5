//! Gathers: on demand they add up with the computation, ahead of time they hide behind it, or it
//! behind them.

use hsdp::{Channel, ModelOptions, StepOptions};
use hsdp_tests::support::worlds::mesh;

use crate::timed::{Timed, UNITS, expect_ticks};

/// One microbatch, of which only the gathers are slow.
fn gathering(prefetch: usize, gather: u32, compute: u32) -> Timed {
    Timed {
        options: ModelOptions { prefetch, ..ModelOptions::on(mesh(1, 2)) },
        begin: StepOptions::microbatches(1),
        microbatches: 1,
        slow: vec![(Channel::Gather, gather)],
        compute: [compute, compute],
    }
}

/// Forward and backward.
const PASSES: u32 = 2 * UNITS;

#[test]
fn without_prefetch_each_gather_is_waited_for_before_its_unit_computes() {
    // The sum.
    expect_ticks(&gathering(0, 1, 1), PASSES * (1 + 1), UNITS);
}

#[test]
fn one_unit_ahead_a_step_takes_the_greater_and_one_unit_more() {
    // The first gather, then a computation of one unit beside the gather of the next.
    expect_ticks(&gathering(1, 1, 1), 1 + PASSES, UNITS / 2);
    // Computation is the greater: gathers are hidden, but for the first.
    expect_ticks(&gathering(1, 1, 2), 1 + 2 * PASSES, UNITS / 2);
    // Gathers are: computation is hidden, but for the last.
    expect_ticks(&gathering(1, 2, 1), 2 * PASSES + 1, UNITS / 2);
}

#[test]
fn two_units_ahead_gain_nothing_where_all_are_alike() {
    expect_ticks(&gathering(2, 1, 1), 1 + PASSES, UNITS / 2);
    expect_ticks(&gathering(2, 1, 2), 1 + 2 * PASSES, UNITS / 2);
    expect_ticks(&gathering(2, 2, 1), 2 * PASSES + 1, UNITS / 2);
}

/// The forward computes twice as long as a gather takes, the backward not at all. The units
/// gathered ahead at the end of the forward are there when the backward begins: one unit, or four.
#[test]
fn what_is_further_ahead_gains_where_units_differ() {
    for ahead in [1, 4] {
        let timed = Timed { compute: [2, 0], ..gathering(ahead as usize, 1, 0) };
        let forward = 1 + 2 * UNITS;
        expect_ticks(&timed, forward + UNITS - ahead, 3);
    }
}
