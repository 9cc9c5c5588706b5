//! Reductions: no rank waits for a reduce-scatter before the next microbatch adds to the same
//! partial, nor for an all-reduce before the step ends.

use hsdp::{Accumulation, Channel, ModelOptions, StepOptions};
use hsdp_tests::support::worlds::mesh;

use crate::timed::{Timed, UNITS, expect_ticks};

/// A step on 2 x 2 ranks whose forward takes no time.
fn reducing(microbatches: u32, slow: &[(Channel, u32)]) -> Timed {
    Timed {
        options: ModelOptions::on(mesh(2, 2)),
        begin: StepOptions::microbatches(microbatches as usize),
        microbatches,
        slow: slow.to_vec(),
        compute: [0, 1],
    }
}

/// The sum would be twice as much.
#[test]
fn reduce_scatters_hide_behind_the_backward_however_far_gathers_are_ahead() {
    for prefetch in [0, 1, 2] {
        for microbatches in [1, 2] {
            let timed = reducing(microbatches, &[(Channel::Reduce, 1)]);
            let options = ModelOptions { prefetch, ..timed.options.clone() };
            // The last unit's reduction is left when the last backward is over.
            expect_ticks(&Timed { options, ..timed }, microbatches * UNITS + 1, UNITS / 2);
        }
    }
}

/// With reductions on demand a step would take the sum of all three.
#[test]
fn gathers_and_reductions_are_on_their_way_at_once() {
    let timed = reducing(1, &[(Channel::Gather, 1), (Channel::Reduce, 1)]);
    // The forward waits for its gathers; the first of the backward is there when it begins.
    expect_ticks(&timed, UNITS + UNITS + 1, UNITS / 2 + 2);
}

#[test]
fn all_reduces_hide_behind_the_last_backward_if_it_is_known_to_be_the_last() {
    const MICROBATCHES: u32 = 2;
    let timed = reducing(MICROBATCHES, &[(Channel::AllReduce, 1)]);
    let backwards = MICROBATCHES * UNITS;
    // A unit's all-reduce is issued with the next unit's reduction; those of the last two are left
    // at the end.
    expect_ticks(&timed, backwards + 1, UNITS / 2);
    // Without a known number of microbatches all of them come at the end: the sum.
    let unknown = Timed { begin: StepOptions::as_many_as_come(), ..timed };
    expect_ticks(&unknown, backwards + UNITS, UNITS / 2);
}

/// The all-reduces of every microbatch are waited for when it ends: half of its time. The deferred
/// ones cost a unit.
#[test]
fn reducing_over_both_axes_every_microbatch_adds_all_reduces_to_each_of_them() {
    const MICROBATCHES: u32 = 3;
    let timed = reducing(MICROBATCHES, &[(Channel::AllReduce, 1)]);
    let options = ModelOptions { accumulation: Accumulation::Every, ..timed.options.clone() };
    let every = Timed { options, ..timed.clone() };
    expect_ticks(&every, MICROBATCHES * 2 * UNITS, UNITS);
    expect_ticks(&timed, MICROBATCHES * UNITS + 1, UNITS / 2);
}
