//! `Error`, `Stop` and `ZeroWeight`, where ranks have data for different numbers of steps.

use hsdp::{
    Accumulation, DataError, Error, LossSum, Mesh, ModelOptions, NextStep, Objective, Param, Rank,
    Step, StepOptions, Supply, Uneven, Unused, Values, World,
};
use hsdp_tests::support::handmade::{self, Handmade};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

use crate::uneven_inputs::{RECIPES, Recipe, assert_near, reference, train};

const STEPS: [u64; 4] = [3, 5, 0, 4];
const MESHES: [(usize, usize); 3] = [(1, 4), (4, 1), (2, 2)];

#[test]
fn with_zero_weight_parameters_are_those_of_the_data_that_there_was() {
    for recipe in RECIPES {
        let expected = reference(recipe, &STEPS);
        for (replicate, shard) in MESHES {
            let options = options(mesh(replicate, shard), Uneven::ZeroWeight);
            // `common`: replicas hold the same bits.
            let (found, end) = common(on_ranks(4, |world| {
                let steps = STEPS[world.rank().index()];
                let mut model = springs::model(world, &options)?;
                let mut optimizer = recipe.optimizer(&model);
                let end = train(&mut model, &mut *optimizer, steps, &|_| Ok(()))?;
                Ok((model.full_parameters()?, end))
            }));
            assert_near(&found, &expected, &format!("{recipe:?} on {}", options.mesh));
            assert_eq!((end.step, end.supply.ready), (5, vec![]));
        }
    }
}

/// Replicas whose optimizer state had drifted apart would show it in the next even step.
#[test]
fn after_zero_weight_even_steps_keep_replicas_bit_identical() {
    for recipe in RECIPES {
        for (replicate, shard) in MESHES {
            let options = options(mesh(replicate, shard), Uneven::ZeroWeight);
            let _ = common(on_ranks(4, |world| {
                let steps = STEPS[world.rank().index()];
                let mut model = springs::model(world, &options)?;
                let mut optimizer = recipe.optimizer(&model);
                train(&mut model, &mut *optimizer, steps, &|_| Ok(()))?;
                train(&mut model, &mut *optimizer, 3, &|_| Ok(()))?;
                model.full_parameters()
            }));
        }
    }
}

/// A rank that has no data need not have gradients.
#[test]
fn a_rank_without_data_leaves_no_parameter_unused() {
    let unused = Unused::ErrorOnAnyRank;
    let options = ModelOptions { unused, ..options(mesh(2, 2), Uneven::ZeroWeight) };
    let found = common(on_ranks(4, |world| {
        let steps = STEPS[world.rank().index()];
        let mut model = springs::model(world, &options)?;
        let mut optimizer = Recipe::AdamW.optimizer(&model);
        train(&mut model, &mut *optimizer, steps, &|_| Ok(()))?;
        model.full_parameters()
    }));
    assert_near(&found, &reference(Recipe::AdamW, &STEPS), "every step is made");
}

/// The mean over no items, and what an autograd makes of it.
struct MeanOfNothing;

impl Handmade for MeanOfNothing {
    fn forward(&mut self, _: &Param, _: Values<'_>) {}

    fn loss(&self) -> LossSum {
        LossSum::from_mean(f64::NAN, 0)
    }

    fn derivative(&self, _: &Param, values: Values<'_>) -> Option<Vec<f32>> {
        Some(vec![f32::NAN; values.len()])
    }
}

/// A rank without data that goes through its model all the same: nothing of that counts, not even a
/// NaN.
#[test]
fn a_microbatch_without_items_contributes_nothing_whatever_its_gradients_are() {
    for accumulation in Accumulation::ALL {
        let gradient = |without_items: &(dyn Fn(&mut Step<'_>) -> Result<(), Error> + Sync)| {
            let options = options(mesh(2, 2), Uneven::ZeroWeight);
            common(on_ranks(4, |world| {
                let rank = world.rank().index();
                let mut model =
                    springs::model(world, &ModelOptions { accumulation, ..options.clone() })?;
                let begin = StepOptions::microbatches(1);
                let begin = if rank == 0 { begin.without_data() } else { begin };
                let mut step = model.begin_step(begin)?;
                match rank {
                    0 => without_items(&mut step)?,
                    _ => springs::microbatch(&mut step, Batch::of(rank, 0, 0))?,
                }
                step.finish()?.full(&model)
            }))
        };
        let nothing = gradient(&|_| Ok(()));
        let nan = gradient(&|step| handmade::microbatch(step, &mut MeanOfNothing));
        assert_eq!(nan, nothing, "{accumulation}");
    }
}

#[test]
fn stop_ends_with_the_first_rank_and_says_who_has_data_left() {
    let steps = [3, 5, 4, 3];
    let (found, end) = common(on_ranks(4, |world| {
        let steps = steps[world.rank().index()];
        let mut model = springs::model(world, &options(mesh(2, 2), Uneven::Stop))?;
        let mut optimizer = Recipe::AdamW.optimizer(&model);
        let end = train(&mut model, &mut *optimizer, steps, &|_| Ok(()))?;
        Ok((model.full_parameters()?, end))
    }));
    assert_near(&found, &reference(Recipe::AdamW, &[3; 4]), "three whole steps");
    let supply = Supply { ready: ranks(&[1, 2]), exhausted: ranks(&[0, 3]) };
    assert_eq!((end.step, end.supply), (3, supply));
}

#[test]
fn error_names_who_is_out_on_all_ranks_and_leaves_the_parameters() {
    let ends = on_ranks(4, |world| {
        let steps = [2, 5, 4, 2][world.rank().index()];
        let mut model = springs::model(world, &options(mesh(2, 2), Uneven::Error))?;
        let mut optimizer = Recipe::AdamW.optimizer(&model);
        let error = train(&mut model, &mut *optimizer, steps, &|_| Ok(())).expect_err("uneven");
        assert!(!error.is_fatal());
        Ok((error.to_string(), model.full_parameters()?))
    });
    let (error, found) = common(ends);
    assert_eq!(
        error,
        "step 2: ranks 0, 3 have no more data, ranks 1, 2 still have data: give every rank the same number of \
         batches, or choose Uneven::Stop or Uneven::ZeroWeight"
    );
    assert_near(&found, &reference(Recipe::AdamW, &[2; 4]), "two whole steps");
}

#[test]
fn a_rank_that_asks_for_no_end_is_told_of_it_as_an_error() {
    let error = common_error(outcomes(2, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &options(mesh(1, 2), Uneven::Stop))?;
        let begin = StepOptions::microbatches(1);
        let begin = if rank == 0 { begin.without_data() } else { begin };
        model.begin_step(begin).map(drop)
    }));
    assert!(matches!(&error, Error::Data(DataError::EndOfData { step: 0, .. })), "{error}");
    assert_eq!(error.to_string(), "step 0 does not begin: ranks 0 have no more data");
}

#[test]
fn zero_weight_needs_an_objective_with_weights() {
    let objective = Objective::RankMean;
    let options = ModelOptions { objective, ..options(Mesh::SINGLE, Uneven::ZeroWeight) };
    let message =
        springs::model(World::single(), &options).expect_err("no mean of nothing").to_string();
    assert!(message.starts_with("Uneven::ZeroWeight with the objective RankMean"), "{message}");
}

#[test]
fn a_rank_that_said_that_it_has_no_data_brings_none() {
    let messages = on_ranks(2, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &options(mesh(2, 1), Uneven::ZeroWeight))?;
        let begin = StepOptions::microbatches(1);
        let begin = if rank == 0 { begin.without_data() } else { begin };
        let NextStep::Step(mut step) = model.next_step(begin)? else { panic!("rank 1 has data") };
        let mut pass = step.microbatch()?;
        let weighed = pass.loss(LossSum::new(0.0, 3));
        Ok(weighed.err().map(|error| error.to_string()))
    });
    let said = messages[0].as_deref().expect("it is refused");
    let expected = "the loss has weight 3, but the rank began the step without data";
    assert!(said.ends_with(expected), "{said}");
}

#[test]
fn ranks_compare_their_policies() {
    let error = common_error(outcomes(2, |world| {
        let policy = [Uneven::Stop, Uneven::ZeroWeight][world.rank().index()];
        springs::model(world, &options(mesh(1, 2), policy))
    }));
    let expected = "an option of the model differs between ranks: rank 1 has uneven ZeroWeight, \
                    rank 0 has uneven Stop";
    assert_eq!(error.to_string(), expected);
}

fn options(mesh: Mesh, uneven: Uneven) -> ModelOptions {
    ModelOptions { uneven, ..ModelOptions::on(mesh) }
}

fn ranks(indices: &[usize]) -> Vec<Rank> {
    indices.iter().copied().map(Rank::new).collect()
}
