//! Row 20: ranks with different divide factors, different modes, or steps of different lengths.

use std::time::Instant;

use hsdp::{Accumulation, Error, ModelOptions, Objective, StepOptions, World};
use hsdp_comm::{Channel, Op};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common_error, mesh, outcomes};

use crate::runner::Happened;
use crate::training::{CULPRIT, RANKS};

pub(crate) fn differ() -> Happened {
    let on = || ModelOptions::on(mesh(2, 2));
    let factor = |factor| (ModelOptions { objective: Objective::Factor(factor), ..on() }, 1);
    let mode = |accumulation| (ModelOptions { accumulation, ..on() }, 1);
    let happened = disagreement("an option of the model", [factor(8.0), factor(16.0)]);
    let modes = [mode(Accumulation::ReduceScatter), mode(Accumulation::Every)];
    disagreement("an option of the model", modes);
    disagreement("the number of microbatches of the step", [(on(), 2), (on(), 3)]);
    happened
}

fn begin(world: World, options: &ModelOptions, microbatches: usize) -> Result<(), Error> {
    let mut model = springs::model(world, options)?;
    model.begin_step(StepOptions::microbatches(microbatches)).map(drop)
}

/// Ranks begin a step, with the first options and number of microbatches; the culprit with the
/// second.
fn disagreement(differs: &str, [usual, other]: [(ModelOptions, usize); 2]) -> Happened {
    let started = Instant::now();
    let error = common_error(outcomes(RANKS, |world| {
        let (options, microbatches) = if world.rank().index() == CULPRIT { &other } else { &usual };
        let ended = begin(world.clone(), options, *microbatches);
        for channel in [Channel::Gather, Channel::Reduce, Channel::AllReduce] {
            let calls = Op::ALL.map(|op| world.ledger().op(channel, op).calls);
            assert_eq!(calls, Op::ALL.map(|_| 0), "data moves on channel {channel}");
        }
        ended
    }));
    let took = started.elapsed();
    let Error::Disagreement { what, rank, .. } = &error else { panic!("{error}") };
    assert_eq!((&**what, rank.index()), (differs, CULPRIT));
    assert!(error.is_fatal());
    Happened::in_time(&error, took)
}
