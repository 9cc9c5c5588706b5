//! Checkpoints of runs with state over the world and over shards are interchanged, on any mesh.

use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints};
use hsdp::{DType, Error, Mesh, ModelOptions, Precision, StateOver, World};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use serde_json::json;

use crate::training::{self, Recipe, Trace, Training};

const STEPS: usize = 2;

/// A place of a run: its mesh, and the ranks over which state is divided.
type Place = (Mesh, StateOver);

fn options((on, state): Place, dtype: DType) -> ModelOptions {
    let precision = Precision { parameters: dtype, wire: dtype, ..Precision::default() };
    ModelOptions { precision, state, ..ModelOptions::on(on) }
}

fn run<O: Checkpointed, T: Send>(
    recipe: &Recipe<O>,
    options: &ModelOptions,
    act: impl Fn(&mut Training<'_, O>) -> Result<T, Error> + Sync,
) -> Vec<T> {
    on_ranks(options.mesh.world_size(), |world: World| {
        act(&mut Training::new(world, recipe, options)?)
    })
}

/// Makes steps, and saves right behind the last update, when slices are under way: at once, or in
/// the background.
fn save<O: Checkpointed>(
    recipe: &Recipe<O>,
    options: &ModelOptions,
    folder: &Path,
    is_in_background: bool,
) {
    run(recipe, options, |training| {
        for _ in 0..STEPS {
            training.step()?;
        }
        let Training { model, state, .. } = training;
        let mut checkpoints = Checkpoints::open(model, folder, CheckpointOptions::default())?;
        if is_in_background {
            checkpoints.save_in_background(model, state, &json!({}))?;
            return checkpoints.finish(model).map(drop);
        }
        checkpoints.save(model, state, &json!({})).map(drop)
    });
}

/// Loads a checkpoint, and goes on.
fn resumed<O: Checkpointed>(
    recipe: &Recipe<O>,
    options: &ModelOptions,
    folder: &Path,
) -> Vec<Trace> {
    common(run(recipe, options, |training| {
        // What a load replaces: parameters, state, and slices that are under way.
        training.step()?;
        let Training { model, state, .. } = &mut *training;
        let mut checkpoints = Checkpoints::open(model, folder, CheckpointOptions::default())?;
        let loaded = checkpoints.load_latest(model, state)?.expect("a checkpoint was saved");
        assert_eq!(loaded.step, STEPS as u64);
        drop(checkpoints);
        training.train(STEPS)
    }))
}

/// Compares runs that go on at each of some places from a checkpoint of each mode.
fn interchange<O: Checkpointed>(recipe: &Recipe<O>, dtype: DType, is_in_background: bool) {
    let folder = tempfile::tempdir().expect("a folder");
    let from = StateOver::ALL.map(|state| {
        let folder = folder.path().join(state.name());
        let options = options((mesh(2, 2), state), dtype);
        save(recipe, &options, &folder, is_in_background);
        folder
    });
    for on in [mesh(2, 2), mesh(1, 3), mesh(3, 1)] {
        let mut expected: Option<Vec<Trace>> = None;
        for state in StateOver::ALL {
            for folder in &from {
                let got = resumed(recipe, &options((on, state), dtype), folder);
                let context = format!("{} {dtype} on {on}, {state} of {folder:?}", recipe.name);
                assert_eq!(got, *expected.get_or_insert_with(|| got.clone()), "{context}");
            }
        }
    }
    // A run that was not interrupted has the bits of one that goes on.
    let options = options((mesh(2, 2), StateOver::World), dtype);
    let straight = common(run(recipe, &options, |training| {
        for _ in 0..STEPS {
            training.step()?;
        }
        training.train(STEPS)
    }));
    assert_eq!(straight, resumed(recipe, &options, &from[0]), "{} {dtype}", recipe.name);
}

#[test]
fn checkpoints_of_adamw_are_interchanged() {
    for dtype in [DType::F32, DType::BF16] {
        for is_in_background in [false, true] {
            interchange(&training::adamw(), dtype, is_in_background);
        }
    }
}

#[test]
fn checkpoints_of_other_optimizers_are_interchanged() {
    interchange(&training::eight_bit(), DType::BF16, false);
    interchange(&training::adafactor(), DType::BF16, true);
    interchange(&training::muon(), DType::BF16, false);
    interchange(&training::owned(), DType::F32, true);
}
