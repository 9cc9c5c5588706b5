//! Replicas that divide optimizer state: the gathers of updated slices are on their way while the
//! next step computes.

use hsdp::{Channel, ModelOptions, StateOver, StepOptions};
use hsdp_tests::support::worlds::mesh;

use crate::timed::{Timed, UNITS, expect_ticks};

/// A step whose operations over the replicas take a tick each, and whose units compute for one.
fn dividing(prefetch: usize) -> Timed {
    let on = ModelOptions::on(mesh(2, 2));
    Timed {
        options: ModelOptions { state: StateOver::World, prefetch, ..on },
        begin: StepOptions::microbatches(1),
        microbatches: 1,
        slow: vec![(Channel::AllReduce, 1)],
        compute: [1, 1],
    }
}

/// The first unit waits for its slices, each other one computes beside the gather of the next, and
/// the last reduction is left at the end. Of 2 x 8 ticks over the replicas 2 are not hidden; without
/// overlap a step would take twice as long.
#[test]
fn slices_are_gathered_beside_the_forward_unit_by_unit() {
    for prefetch in [0, 1, 2] {
        expect_ticks(&dividing(prefetch), 1 + UNITS + UNITS + 1, UNITS / 2);
    }
}

/// A gather that is issued ahead waits for the slices of its unit, and the unit in use does not.
#[test]
fn a_gather_ahead_that_waits_for_slices_delays_no_unit_before_it() {
    let timed = dividing(1);
    let slow = vec![(Channel::AllReduce, 2)];
    // Slices come every two ticks: computation hides behind them, but for that of the last unit.
    let forward = 2 * UNITS + 1;
    // So do the reductions: the backward hides behind them, but for the first unit's.
    let backward = 1 + 2 * UNITS;
    expect_ticks(&Timed { slow, ..timed }, forward + backward, UNITS / 2);
}
