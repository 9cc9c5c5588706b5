//! Checkpoints of runs with state over the world and over shards are interchanged, on any mesh.

use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints, Content};
use hsdp::{DType, Error, Mesh, ModelOptions, Param, Precision, ShardedModel, StateOver, World};
use hsdp_sharding::Role;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use serde_json::json;

use crate::training::{self, Recipe, Trace, Training};

const STEPS: usize = 2;

/// A place of a run: its mesh, and the ranks over which state is divided.
type Place = (Mesh, StateOver);

/// How runs save.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Saving {
    /// The dtype of parameters and of the wire.
    pub(crate) dtype: DType,
    pub(crate) content: Content,
    pub(crate) is_in_background: bool,
}

impl Saving {
    /// Returns the way to save all parameters at once.
    pub(crate) fn of(dtype: DType) -> Self {
        Self { dtype, content: Content::All, is_in_background: false }
    }

    pub(crate) fn options(self, (on, state): Place) -> ModelOptions {
        let Self { dtype, .. } = self;
        let precision = Precision { parameters: dtype, wire: dtype, ..Precision::default() };
        ModelOptions { precision, state, ..ModelOptions::on(on) }
    }

    fn open(self, model: &ShardedModel, folder: &Path) -> Result<Checkpoints, Error> {
        let options = CheckpointOptions { content: self.content, ..CheckpointOptions::default() };
        Checkpoints::open(model, folder, options)
    }
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
pub(crate) fn save<O: Checkpointed>(
    recipe: &Recipe<O>,
    saving: Saving,
    place: Place,
    folder: &Path,
) {
    run(recipe, &saving.options(place), |training| {
        for _ in 0..STEPS {
            training.step()?;
        }
        let Training { model, state, .. } = training;
        let mut checkpoints = saving.open(model, folder)?;
        if saving.is_in_background {
            checkpoints.save_in_background(model, state, &json!({}))?;
            return checkpoints.finish(model).map(drop);
        }
        checkpoints.save(model, state, &json!({})).map(drop)
    });
}

/// Loads a checkpoint into a model with other values, and goes on.
fn resumed<O: Checkpointed>(
    recipe: &Recipe<O>,
    saving: Saving,
    place: Place,
    folder: &Path,
) -> Vec<Trace> {
    let initial: fn(&Param) -> Vec<f32> = match saving.content {
        Content::All => |param| vec![1.0; param.numel()],
        // The checkpoint has no frozen parameters.
        Content::Trainable => |param| match param.role {
            Role::Trainable => vec![1.0; param.numel()],
            Role::Frozen => training::initial(param),
        },
    };
    let recipe = Recipe { initial, ..*recipe };
    common(run(&recipe, &saving.options(place), |training| {
        // What a load replaces: parameters, state, and slices that are under way.
        training.step()?;
        let Training { model, state, .. } = &mut *training;
        let mut checkpoints = saving.open(model, folder)?;
        let loaded = checkpoints.load_latest(model, state)?.expect("a checkpoint was saved");
        assert_eq!(loaded.step, STEPS as u64);
        drop(checkpoints);
        training.train(STEPS)
    }))
}

/// Compares runs that go on at each of some places from a checkpoint of each mode.
pub(crate) fn interchange<O: Checkpointed>(recipe: &Recipe<O>, saving: Saving) {
    let folder = tempfile::tempdir().expect("a folder");
    let from = StateOver::ALL.map(|state| {
        let folder = folder.path().join(state.name());
        save(recipe, saving, (mesh(2, 2), state), &folder);
        folder
    });
    for on in [mesh(2, 2), mesh(1, 3), mesh(3, 1)] {
        let mut expected: Option<Vec<Trace>> = None;
        for state in StateOver::ALL {
            for folder in &from {
                let got = resumed(recipe, saving, (on, state), folder);
                let context = format!("{} {saving:?} on {on}, {state} of {folder:?}", recipe.name);
                assert_eq!(got, *expected.get_or_insert_with(|| got.clone()), "{context}");
            }
        }
    }
    // A run that was not interrupted has the bits of one that goes on.
    let place = (mesh(2, 2), StateOver::World);
    let straight = common(run(recipe, &saving.options(place), |training| {
        for _ in 0..STEPS {
            training.step()?;
        }
        training.train(STEPS)
    }));
    let resumed = resumed(recipe, saving, place, &from[0]);
    assert_eq!(straight, resumed, "{} {saving:?}", recipe.name);
}

#[test]
fn checkpoints_of_adamw_are_interchanged() {
    for dtype in [DType::F32, DType::BF16] {
        for is_in_background in [false, true] {
            let saving = Saving { is_in_background, ..Saving::of(dtype) };
            interchange(&training::adamw(), saving);
        }
    }
}

#[test]
fn checkpoints_of_other_optimizers_are_interchanged() {
    let at_once = Saving::of(DType::BF16);
    let in_background = Saving { is_in_background: true, ..at_once };
    interchange(&training::eight_bit(), at_once);
    interchange(&training::adafactor(), in_background);
    interchange(&training::muon(), at_once);
    interchange(&training::owned(), Saving { dtype: DType::F32, ..in_background });
}
