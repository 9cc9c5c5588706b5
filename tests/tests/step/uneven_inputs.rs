//! Ranks that bring different things: data for more steps than others, more microbatches, or other
//! units and another order within a microbatch.
//!
//! Parameters end as on one rank that sees all the data, on every mesh, with optimizers that have
//! state. A policy that does not allow uneven data fails on all ranks, in the same step.
//!
//! `cases`, `policies`: steps. `microbatches`: microbatches. `skipped_units`: units. `golden`: a
//! run in numbers.

mod cases;
mod golden;
mod microbatches;
mod policies;
mod skipped_units;

use std::collections::BTreeMap;

use hsdp::{
    AdamW, AdamWOptions, EndOfRun, Error, Mesh, ModelOptions, NextStep, Optimizer, Sgd, SgdOptions,
    ShardedModel, StepOptions, World,
};
use hsdp_tests::support::springs::{self, Batch};

type Parameters = BTreeMap<String, Vec<f32>>;

#[derive(Clone, Copy, Debug)]
enum Recipe {
    Momentum,
    AdamW,
}

const RECIPES: [Recipe; 2] = [Recipe::Momentum, Recipe::AdamW];

impl Recipe {
    fn optimizer(self, model: &ShardedModel) -> Box<dyn Optimizer> {
        match self {
            Self::AdamW => {
                let options = AdamWOptions { learning_rate: 0.01, ..AdamWOptions::default() };
                Box::new(AdamW::new(model, options))
            }
            Self::Momentum => {
                let learning_rate = 0.05;
                let options = SgdOptions { momentum: 0.9, learning_rate, ..SgdOptions::default() };
                Box::new(Sgd::new(model, options))
            }
        }
    }
}

/// The action of a rank after its microbatches, in each step for which it has data.
type AfterStep<'a> = &'a dyn Fn(&World) -> Result<(), Error>;

/// Trains for as many steps of one microbatch as this rank has data for, and as others have.
/// Returns the end that all ranks were told of, and how many steps there were.
fn train(
    model: &mut ShardedModel,
    optimizer: &mut dyn Optimizer,
    steps: u64,
    after_step: AfterStep<'_>,
) -> Result<EndOfRun, Error> {
    let world = model.world().clone();
    let rank = model.rank().index();
    for number in 0.. {
        let begin = StepOptions::microbatches(1);
        let begin = if number < steps { begin } else { begin.without_data() };
        let mut step = match model.next_step(begin)? {
            NextStep::Step(step) => step,
            NextStep::End(end) => return Ok(end),
        };
        if number < steps {
            springs::microbatch(&mut step, Batch::of(rank, number, 0))?;
            if let Err(error) = after_step(&world) {
                // All ranks get this rank's error: a drop alone would only say that it dropped the
                // step.
                step.abandon(error.to_string());
                return Err(error);
            }
        }
        let gradients = step.finish()?;
        optimizer.step(model, gradients)?;
    }
    unreachable!("data ends")
}

/// The parameters that one rank ends with that sees, in each step, what `ranks` see of it: each has
/// data for so many steps.
fn reference(recipe: Recipe, ranks: &[u64]) -> Parameters {
    reference_of(recipe, &[ranks])
}

/// The same of several runs, one after the other with the same optimizer.
fn reference_of(recipe: Recipe, runs: &[&[u64]]) -> Parameters {
    let mut model =
        springs::model(World::single(), &ModelOptions::on(Mesh::SINGLE)).expect("a model");
    let mut optimizer = recipe.optimizer(&model);
    for ranks in runs {
        for number in 0..ranks.iter().copied().max().unwrap_or(0) {
            let mut step = model.begin_step(StepOptions::as_many_as_come()).expect("a step");
            for (rank, _) in ranks.iter().enumerate().filter(|(_, steps)| number < **steps) {
                springs::microbatch(&mut step, Batch::of(rank, number, 0)).expect("a microbatch");
            }
            let gradients = step.finish().expect("gradients");
            optimizer.step(&mut model, gradients).expect("an update");
        }
    }
    model.full_parameters().expect("parameters")
}

/// The same up to the order of sums: weights are exact, so nothing else may differ.
fn assert_near(found: &Parameters, expected: &Parameters, context: &str) {
    for (name, expected) in expected {
        for (found, expected) in found[name].iter().zip(expected) {
            let off = (found - expected).abs();
            assert!(
                off <= 2e-6 * expected.abs().max(1.0),
                "{context}: {name}: {found}, {expected}"
            );
        }
    }
}
