//! A save whose last exchange fails when the checkpoint is on the disk: the same call returns it,
//! and no other save does.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Saved};
use hsdp::{CommError, Error, ModelOptions, Param, StepOptions, Unit, World};
use hsdp_comm::StepFailure;
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{mesh, on_ranks};
use serde_json::json;

use super::hooked::Hooked;
use super::training::Training;

const RANKS: usize = 4;

/// Checkpoints of which the first save fails when rank 0 makes the link, which is after the commit.
fn failing_after_commit(
    world: World,
    training: &Training,
    root: &Path,
) -> Result<Checkpoints, Error> {
    let has_failed = AtomicBool::new(false);
    let files = Hooked::by(move |operation, _| {
        if operation == "link" && !has_failed.swap(true, Ordering::Relaxed) {
            world.abort_step(StepFailure { step: 0, reason: "a test".to_owned() });
        }
        Ok(())
    });
    let options = CheckpointOptions { files: Arc::new(files), ..CheckpointOptions::default() };
    Checkpoints::open(&training.model, root, options)
}

/// Saves after a step, and has the exchange after the commit fail; then makes another call.
fn then<T: Send>(
    root: &Path,
    call: impl Fn(&mut Training, &mut Checkpoints) -> Result<T, Error> + Sync,
) -> Vec<T> {
    on_ranks(RANKS, |world| {
        let options = ModelOptions::on(mesh(2, 2));
        let mut training = Training::new(world.clone(), &options)?;
        training.train(1)?;
        training.save(&mut training.checkpoints(&root.join("other"))?)?;
        let mut checkpoints = failing_after_commit(world, &training, root)?;
        let told = training.save(&mut checkpoints).expect_err("its last exchange fails");
        assert!(matches!(told, Error::Comm(CommError::StepAborted { .. })), "{told}");
        assert_eq!(checkpoints.store().steps().expect("listed"), [1]);
        call(&mut training, &mut checkpoints)
    })
}

#[test]
fn the_same_save_returns_the_checkpoint_however_often_it_is_called() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = then(folder.path(), |training, checkpoints| {
        let saved = training.save(checkpoints)?;
        assert_eq!(training.save(checkpoints)?, saved);
        training.train(1)?;
        assert_eq!(training.save(checkpoints)?.step, 2);
        Ok(saved)
    });
    let path =
        |rank| -> Option<PathBuf> { (rank == 0).then(|| folder.path().join("step-00000001")) };
    for (rank, saved) in saved.into_iter().enumerate() {
        assert_eq!(saved, Saved { step: 1, path: path(rank) });
    }
}

/// Another save of this step would have another content.
#[test]
fn another_save_of_that_step_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = then(folder.path(), |training, checkpoints| {
        let Training { model, optimizer } = training;
        let with_another_cursor = checkpoints.save(model, optimizer, &json!("another"));
        let mut others = training.checkpoints(&folder.path().join("other"))?;
        others.load_latest(&mut training.model, &mut training.optimizer)?;
        let after_a_load = training.save(checkpoints);
        Ok([with_another_cursor, after_a_load].map(|it| it.expect_err("it exists").to_string()))
    });
    for told in told.into_iter().flatten() {
        assert!(told.contains("step-00000001 exists and is intact"), "{told}");
    }
}

/// Its gradients were dropped, so no step was committed, and its writes count all the same.
#[test]
fn a_save_after_a_step_that_has_written_a_buffer_is_another_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let norm = Unit::new("bn").param(Param::new("w", [2])).param(Param::new("mean", [2]).buffer());
    let spec = three_units().unit(norm);
    let mean = spec.find_buffer("mean").expect("it is declared");
    let told = on_ranks(RANKS, |world| {
        let options = ModelOptions::on(mesh(2, 2));
        let model = springs::model_of(world.clone(), &spec, &options)?;
        let mut training = Training::of(model);
        let mut checkpoints = failing_after_commit(world, &training, folder.path())?;
        training.save(&mut checkpoints).expect_err("its last exchange fails");
        let rank = training.model.rank().index();
        let mut step = training.model.begin_step(StepOptions::microbatches(1))?;
        let pass = step.microbatch()?;
        pass.handle().write_buffer(mean, &[5.0; 2])?;
        springs::forward_and_backward(pass, Batch::of(rank, 0, 0))?;
        drop(step.finish()?);
        Ok(training.save(&mut checkpoints).expect_err("it exists").to_string())
    });
    for told in told {
        assert!(told.contains("step-00000000 exists and is intact"), "{told}");
    }
}
