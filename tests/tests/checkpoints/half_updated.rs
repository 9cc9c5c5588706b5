//! An update that stops in its middle, as by a panic that the program catches: its parameters are
//! those of no step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{
    Error, Gradients, ModelOptions, Optimizer as _, Sgd, SgdOptions, ShardedModel, StateOver,
    StepOptions, World,
};
use hsdp_tests::support::models::one_parameter;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{mesh, on_ranks, outcomes};
use serde_json::Value;
use tempfile::TempDir;

/// A model, its optimizer, and its checkpoints in a folder, of which the first is saved.
fn saved(
    world: World,
    folder: &Path,
    state: StateOver,
) -> Result<(ShardedModel, Sgd, Checkpoints), Error> {
    let options = ModelOptions { state, ..ModelOptions::on(mesh(2, 2)) };
    let model = ShardedModel::new(world, one_parameter(100), options, springs::initial)?;
    let sgd = Sgd::new(&model, SgdOptions::default());
    let mut checkpoints = Checkpoints::open(&model, folder, CheckpointOptions::default())?;
    checkpoints.save(&model, &sgd, &Value::Null)?;
    Ok((model, sgd, checkpoints))
}

/// The gradients of a step.
fn gradients(model: &mut ShardedModel) -> Result<Gradients, Error> {
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    springs::microbatch(&mut step, Batch::of(0, 0, 0))?;
    step.finish()
}

/// Fills the parameters with zeros, and panics, on every rank.
fn update_half(model: &mut ShardedModel) -> Result<(), Error> {
    let gradients = gradients(model)?;
    let update = AssertUnwindSafe(|| {
        model.update(gradients, |run| {
            run.parameters.fill(0.0);
            panic!("an optimizer is broken");
        })
    });
    assert!(catch_unwind(update).is_err());
    Ok(())
}

#[test]
fn half_updated_parameters_are_not_saved() {
    for state in StateOver::ALL {
        for in_background in [false, true] {
            let folder = TempDir::new().expect("a folder");
            let told = outcomes(4, |world| {
                let (mut model, sgd, mut checkpoints) = saved(world, folder.path(), state)?;
                update_half(&mut model)?;
                if in_background {
                    checkpoints.save_in_background(&model, &sgd, &Value::Null)
                } else {
                    checkpoints.save(&model, &sgd, &Value::Null).map(drop)
                }
            });
            for told in told {
                let told = told.expect_err("the parameters are those of no step").to_string();
                assert!(told.contains("step 0: the update has not ended"), "{state}: {told}");
            }
        }
    }
}

/// Each replica has updated other elements, or none.
#[test]
fn a_load_does_not_replace_half_updated_slices() {
    let folder = TempDir::new().expect("a folder");
    let told = outcomes(4, |world| {
        let (mut model, mut sgd, mut checkpoints) = saved(world, folder.path(), StateOver::World)?;
        update_half(&mut model)?;
        checkpoints.load_latest(&mut model, &mut sgd).map(drop)
    });
    for told in told {
        let error = told.expect_err("the parameters are those of no step");
        assert!(error.is_fatal(), "{error}");
        assert!(error.to_string().contains("step 0: the update has not ended"), "{error}");
    }
}

#[test]
fn a_load_replaces_half_updated_parameters_and_training_goes_on() {
    let folder = TempDir::new().expect("a folder");
    on_ranks(4, |world| {
        let (mut model, mut sgd, mut checkpoints) = saved(world, folder.path(), StateOver::Shards)?;
        let before = model.full_parameters()?;
        update_half(&mut model)?;
        checkpoints.load_latest(&mut model, &mut sgd)?.expect("a checkpoint");
        assert_eq!(model.full_parameters()?, before);
        let gradients = gradients(&mut model)?;
        sgd.step(&mut model, gradients)?;
        model.end_run()
    });
}

/// A program that sees a loss rise drops the gradients, and goes back to a checkpoint.
#[test]
fn gradients_of_before_a_load_are_not_forgotten() {
    let folder = TempDir::new().expect("a folder");
    let said = Said::default();
    on_ranks(4, |world| {
        let _said = tracing::subscriber::set_default(said.clone());
        let (mut model, mut sgd, mut checkpoints) = saved(world, folder.path(), StateOver::Shards)?;
        drop(gradients(&mut model)?);
        checkpoints.load_latest(&mut model, &mut sgd)?.expect("a checkpoint");
        let gradients = gradients(&mut model)?;
        sgd.step(&mut model, gradients)?;
        model.end_run()
    });
    let said = said.warnings();
    assert!(!said.iter().any(|(said, _)| said.contains("were dropped")), "{said:?}");
}
