//! Row 56: the loader of a rank gives it what another rank has.

use std::time::Instant;

use hsdp::{
    AdamW, AdamWOptions, DataError, Error, ModelOptions, Optimizer, Samples, StepOptions, Uneven,
};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::runner::Happened;
use crate::training::{CULPRIT, RANKS};

/// Steps, of which this one goes wrong.
const STEPS: u64 = 3;
const FAULTY: u64 = 1;

pub(crate) fn the_same() -> Happened {
    let started = Instant::now();
    let ended = on_ranks(RANKS, |world| {
        let rank = world.rank().index();
        let options = ModelOptions::on(mesh(2, 2));
        let mut model = springs::model(world, &options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let mut told = None;
        for attempt in 0..STEPS + 1 {
            // As if the rank had not been told apart from the one before.
            let of_rank = if attempt == FAULTY && rank == CULPRIT { CULPRIT - 1 } else { rank };
            let step = model.committed_steps();
            let first = (RANKS as u64 * step + of_rank as u64) * 10;
            let samples = Some(Samples::of(first..first + 10));
            let begin = StepOptions { samples, ..StepOptions::microbatches(1) };
            let mut step = match model.begin_step(begin) {
                Err(error @ Error::Data(DataError::SameSamples { .. })) => {
                    assert!(!error.is_fatal());
                    told = Some(error.to_string());
                    continue;
                }
                step => step?,
            };
            springs::microbatch(&mut step, Batch::of(rank, attempt, 0))?;
            let gradients = step.finish()?;
            adamw.step(&mut model, gradients)?;
        }
        Ok((told, model.committed_steps()))
    });
    let took = started.elapsed();
    those_that_have_none_are_not_the_same();
    let (told, steps) = common(ended);
    assert_eq!(steps, STEPS, "all others are made");
    Happened::in_time(&told.expect("it is found"), took)
}

/// Ranks without data say nothing of it, whatever they name; nor do two that have data and name no
/// sample.
fn those_that_have_none_are_not_the_same() {
    let options = ModelOptions { uneven: Uneven::ZeroWeight, ..ModelOptions::on(mesh(2, 2)) };
    on_ranks(RANKS, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &options)?;
        let none = StepOptions { samples: Some(Samples::of([])), ..StepOptions::microbatches(1) };
        let seven = StepOptions { samples: Some(Samples::of([7])), ..none };
        let begin = match rank {
            0 => seven,
            1 => seven.without_data(),
            _ => none,
        };
        model.begin_step(begin).map(drop)
    });
}
