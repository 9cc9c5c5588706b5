//! An update that fails in its middle on one rank. Over shards the rank may load a checkpoint and go
//! on (`tests/tests/checkpoints/half_updated.rs`). Over the world the others wait for its slices, so
//! the world ends on all ranks, whatever they call next.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{
    AdamW, DType, Error, ModelOptions, Optimizer, Precision, Rank, Run, StateOver, Updating, World,
    WorldOptions,
};
use hsdp_comm::{Fault, FaultKind, Stage};
use hsdp_tests::support::models::unit;
use hsdp_tests::support::worlds::{DEADLINE, launched, mesh};
use serde_json::Value;

use crate::training::{self, Training};

/// The rank whose update fails, and the step.
const CULPRIT: usize = 2;
const STEP: u64 = 1;

fn options(dtype: DType) -> ModelOptions {
    let precision = Precision { parameters: dtype, ..Precision::default() };
    ModelOptions { precision, state: StateOver::World, ..ModelOptions::on(mesh(2, 2)) }
}

/// A call behind the update, with checkpoints of the model.
type Call = fn(&mut Training<'_, AdamW>, &mut Checkpoints) -> Result<(), Error>;

const CALLS: [(&str, Call); 11] = [
    ("a step", |training, _| training.gradients().map(drop)),
    ("the end of the run", |training, _| training.model.end_run()),
    ("an evaluation", |training, _| training.model.evaluation()?.batch().map(drop)),
    ("a wait for slices", |training, _| training.model.await_slices()),
    ("full parameters", |training, _| training.model.full_parameters().map(drop)),
    ("norms", |training, _| training.model.norms().map(drop)),
    ("histograms", |training, _| training.model.histograms().map(drop)),
    ("averages", |training, _| {
        training.model.with_shards(&training.state.1, |model| model.norms().map(drop))
    }),
    ("a save", |training, checkpoints| {
        checkpoints.save(&training.model, &training.state, &Value::Null).map(drop)
    }),
    ("a save in the background", |training, checkpoints| {
        checkpoints.save_in_background(&training.model, &training.state, &Value::Null)
    }),
    ("a load", |training, checkpoints| {
        checkpoints.load_latest(&mut training.model, &mut training.state).map(drop)
    }),
];

/// Makes a step, saves, and has the update of the next step fail by `update` or by a fault. Returns
/// the error of the failing update, if it returned one, and each rank's error of the call behind.
fn after_a_failed_update(
    dtype: DType,
    faults: Vec<Fault>,
    update: impl Fn(&mut Training<'_, AdamW>) -> Option<Error> + Sync,
    call: Call,
    folder: &Path,
) -> (Option<Error>, Vec<Error>) {
    let recipe = training::adamw();
    let options = options(dtype);
    let of_world = WorldOptions { faults, deadline: DEADLINE, ..WorldOptions::default() };
    let ended = launched(4, of_world, |world: World| {
        let rank = world.rank().index();
        let mut training = Training::new(world, &recipe, &options)?;
        training.step()?;
        let with = CheckpointOptions::default();
        let mut checkpoints = Checkpoints::open(&training.model, folder, with)?;
        checkpoints.save(&training.model, &training.state, &Value::Null)?;
        let failed = match rank {
            CULPRIT => update(&mut training),
            _ => training.step().map(drop).err(),
        };
        assert!(failed.is_none() || rank == CULPRIT, "rank {rank}: {failed:?}");
        let error = call(&mut training, &mut checkpoints).expect_err("the update is half made");
        Ok::<_, Error>((failed, error))
    });
    let ended = ended.into_iter().map(|rank| rank.expect("no panic").expect("it trains"));
    let (mut failed, errors): (Vec<_>, Vec<_>) = ended.unzip();
    (failed.swap_remove(CULPRIT), errors)
}

/// An optimizer that panics in the update of a unit.
struct Failing(usize);

impl Optimizer for Failing {
    fn check(&mut self, _: &Updating<'_>, _: &mut String) -> Result<(), Error> {
        Ok(())
    }

    fn update(&mut self, run: Run<'_>) {
        assert!(run.unit.index() != self.0, "the update fails in unit {}", self.0);
    }

    fn set_learning_rate(&mut self, _: f64) {}
}

/// The rank catches the panic. The others learn of it by its next call.
#[test]
fn a_panic_in_an_update_ends_the_world_with_the_next_call() {
    let folder = tempfile::tempdir().expect("a folder");
    for dtype in [DType::F32, DType::BF16] {
        for (number, (what, call)) in CALLS.into_iter().enumerate() {
            // The first unit to be updated, or one behind slices that are under way.
            let failing = [0, 3][number % 2];
            let panic = |training: &mut Training<'_, AdamW>| {
                let gradients = training.gradients().expect("a step");
                let step = AssertUnwindSafe(|| {
                    Failing(failing).step(&mut training.model, gradients).map(drop)
                });
                assert!(catch_unwind(step).is_err());
                None
            };
            let folder = folder.path().join(format!("{dtype} {number}"));
            let (_, errors) = after_a_failed_update(dtype, Vec::new(), panic, call, &folder);
            for (rank, error) in errors.into_iter().enumerate() {
                let told = error.to_string();
                assert!(error.is_fatal(), "{what}, {dtype}, rank {rank}: {told}");
                let expected = format!(
                    "optimizer step on rank {CULPRIT}, step {STEP}: the update has not ended"
                );
                assert!(told.contains(&expected), "{what}, {dtype}, rank {rank}: {told}");
            }
        }
    }
}

/// The gather of a unit's slices fails on one rank, behind the update of the unit.
#[test]
fn an_error_in_an_update_ends_the_world_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    for dtype in [DType::F32, DType::BF16] {
        for kind in [FaultKind::Error, FaultKind::OutOfMemory] {
            for (number, (what, call)) in CALLS.into_iter().enumerate() {
                let place = (unit([0, 3][number % 2]), Stage::GatherSlices);
                let faults = vec![Fault::at(Rank::new(CULPRIT), STEP, place, kind)];
                let update = |training: &mut Training<'_, AdamW>| training.step().map(drop).err();
                let folder = folder.path().join(format!("{dtype} {kind} {number}"));
                let (own, errors) = after_a_failed_update(dtype, faults, update, call, &folder);
                let own = own.expect("the update fails").to_string();
                assert!(own.contains("gather_slices"), "{own}");
                for (rank, error) in errors.into_iter().enumerate() {
                    let told = error.to_string();
                    assert!(error.is_fatal(), "{what}, {dtype}, rank {rank}: {told}");
                    let names = told.contains(&own) && told.contains(&format!("rank {CULPRIT}"));
                    assert!(names, "{what}, {dtype}, rank {rank}: {told}, not {own}");
                }
            }
        }
    }
}
