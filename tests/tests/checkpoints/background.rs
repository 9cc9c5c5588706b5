//! Saves while training goes on: what is saved is what was there when it was asked for, and nothing
//! waits for the disk.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Saved};
use hsdp::{DType, Error, ModelOptions, Precision, StepOptions};
use hsdp_checkpoint::{Disk, Files, Hash, Store};
use hsdp_comm::Channel;
use hsdp_tests::support::worlds::{DEADLINE, common, mesh, on_ranks};

use super::hooked::{Gate, Hooked};
use super::training::Training;

const RANKS: usize = 4;

fn options() -> ModelOptions {
    ModelOptions::on(mesh(2, 2))
}

fn with(files: Arc<dyn Files>) -> CheckpointOptions {
    CheckpointOptions { files, ..CheckpointOptions::default() }
}

/// Makes a step after the other until the save in the background is over.
fn train_until_it_ends(
    training: &mut Training,
    checkpoints: &mut Checkpoints,
) -> Result<Saved, Error> {
    loop {
        training.train(1)?;
        if let Some(saved) = checkpoints.poll(&training.model)? {
            return Ok(saved);
        }
    }
}

/// Returns the step and the state of each rank in a world that loads the newest checkpoint.
fn resumed(options: &ModelOptions, root: &Path) -> Vec<(u64, Hash)> {
    on_ranks(options.mesh.world_size(), |world| {
        let mut training = Training::new(world, options)?;
        let resumed = training.load_latest(root)?.expect("there is one");
        Ok((resumed.step, training.bits()?))
    })
}

fn steps(root: &Path) -> Vec<u64> {
    Store::new(root, Arc::new(Disk)).steps().expect("listed")
}

/// The optimizer begins to write to what is saved before any of it is in a file.
#[test]
fn row_58_what_is_saved_is_what_was_there_before_the_steps_that_go_on() {
    let half = Precision { parameters: DType::BF16, wire: DType::F32, output: None };
    for (replicate, shard) in [(1, 1), (1, 3), (3, 1), (2, 2)] {
        let options = ModelOptions { precision: half, ..ModelOptions::on(mesh(replicate, shard)) };
        let folder = tempfile::tempdir().expect("a folder");
        let then = on_ranks(options.mesh.world_size(), |world| {
            let gate = Gate::default();
            let mut training = Training::new(world, &options)?;
            let files = with(gate.files());
            let mut checkpoints = Checkpoints::open(&training.model, folder.path(), files)?;
            training.train(2)?;
            let bits = training.bits()?;
            training.save_in_background(&mut checkpoints)?;
            // Steps are made while no file can be written.
            for _ in 0..5 {
                training.train(1)?;
                assert_eq!(checkpoints.poll(&training.model)?, None);
            }
            assert_ne!(training.bits()?, bits);
            gate.open();
            let saved = train_until_it_ends(&mut training, &mut checkpoints)?;
            assert_eq!(saved.step, 2);
            assert_eq!(checkpoints.poll(&training.model)?, None, "it is told once");
            Ok((2, bits))
        });
        assert_eq!(resumed(&options, folder.path()), then, "{replicate}x{shard}");
    }
}

#[test]
fn the_files_are_those_of_a_save_that_is_waited_for() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let [waited, background] = folders.each_ref().map(tempfile::TempDir::path);
    on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        training.train(3)?;
        training.save(&mut training.checkpoints(waited)?)?;
        let mut checkpoints = training.checkpoints(background)?;
        training.save_in_background(&mut checkpoints)?;
        let saved = checkpoints.finish(&training.model)?.expect("it was under way");
        assert_eq!((saved.step, saved.path.is_some()), (3, training.model.rank().index() == 0));
        assert_eq!(checkpoints.finish(&training.model)?, None);
        Ok(())
    });
    let names = |root: &Path| {
        let entries = std::fs::read_dir(root.join("step-00000003")).expect("a generation");
        let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(waited), names(background));
    for name in names(waited) {
        let [one, other] = [waited, background]
            .map(|root| std::fs::read(root.join("step-00000003").join(&name)).expect("a file"));
        assert!(one == other, "{} differs", name.display());
    }
}

/// The second waits for the first, and the first is told by the next call.
#[test]
fn one_is_in_flight_at_most() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        training.train(1)?;
        training.save_in_background(&mut checkpoints)?;
        training.train(1)?;
        training.save_in_background(&mut checkpoints)?;
        assert_eq!(checkpoints.poll(&training.model)?.map(|saved| saved.step), Some(1));
        training.train(1)?;
        training.save(&mut checkpoints)?;
        assert_eq!(checkpoints.poll(&training.model)?.map(|saved| saved.step), Some(2));
        assert_eq!(checkpoints.finish(&training.model)?, None);
        Ok(())
    });
    assert_eq!(steps(folder.path()), [2, 3], "two are kept");
}

/// A bug in a file system is told like any other failure.
#[test]
fn a_panic_of_a_thread_that_writes_is_a_failed_save() {
    let folder = tempfile::tempdir().expect("a folder");
    for culprit in [0, 2] {
        let told = on_ranks(RANKS, |world| {
            let rank = world.rank().index();
            let mut training = Training::new(world, &options())?;
            let files = Hooked::by(move |operation, _| match operation {
                "create" if rank == culprit => panic!("a bug in a file system"),
                _ => Ok(()),
            });
            let root = folder.path().join(culprit.to_string());
            let mut checkpoints = Checkpoints::open(&training.model, &root, with(Arc::new(files)))?;
            training.train(1)?;
            training.save_in_background(&mut checkpoints)?;
            let told = checkpoints.finish(&training.model).expect_err("a rank has panicked");
            assert_eq!(checkpoints.finish(&training.model)?, None);
            drop(checkpoints);
            training.save(&mut training.checkpoints(&root)?)?;
            Ok(told.to_string())
        });
        let told = common(told);
        let expected =
            format!("saving at step 1, on rank {culprit}: it panicked: a bug in a file system");
        assert_eq!(told, expected);
    }
}

/// Dropped while it is under way, it is given up. Threads that are late may leave something behind,
/// which is in nobody's way, and which the next ones remove.
#[test]
fn a_save_that_is_dropped_is_given_up() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        training.train(1)?;
        training.save(&mut training.checkpoints(folder.path())?)?;
        training.train(1)?;
        let gate = Gate::default();
        let mut checkpoints =
            Checkpoints::open(&training.model, folder.path(), with(gate.files()))?;
        training.save_in_background(&mut checkpoints)?;
        drop(checkpoints);
        gate.open();
        // The thread that has the right to write gives it back when it has removed what was there.
        let begun = Instant::now();
        let mut checkpoints = loop {
            match training.checkpoints(folder.path()) {
                Err(error) if error.to_string().contains("is being written to by") => {
                    assert!(begun.elapsed() < DEADLINE, "{error}");
                }
                opened => break opened?,
            }
        };
        training.save(&mut checkpoints)?;
        Ok(())
    });
    assert_eq!(steps(folder.path()), [1, 2]);
}

#[test]
fn a_step_that_is_given_up_meanwhile_is_no_matter() {
    let folder = tempfile::tempdir().expect("a folder");
    let then = on_ranks(RANKS, |world| {
        let gate = Gate::default();
        let mut training = Training::new(world, &options())?;
        let files = with(gate.files());
        let mut checkpoints = Checkpoints::open(&training.model, folder.path(), files)?;
        training.train(1)?;
        let bits = training.bits()?;
        training.save_in_background(&mut checkpoints)?;
        drop(training.model.begin_step(StepOptions::default())?);
        gate.open();
        train_until_it_ends(&mut training, &mut checkpoints)?;
        Ok((1, bits))
    });
    assert_eq!(resumed(&options(), folder.path()), then);
}

/// Who says something else than the others is told before anything is copied.
#[test]
fn what_ranks_save_of_the_program_is_the_same_on_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = on_ranks(2, |world| {
        let training = Training::new(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        let user = serde_json::json!(training.model.rank().index());
        let begun = checkpoints.save_in_background(&training.model, &training.optimizer, &user);
        let told = begun.expect_err("they differ").to_string();
        training.save(&mut checkpoints)?;
        Ok(told)
    });
    assert!(common(told).contains("the value `user` is not the same as on rank"));
}

/// One compares what is saved, and one says that all ranks have their copies.
#[test]
fn the_begin_of_a_save_costs_two_exchanges() {
    let folder = tempfile::tempdir().expect("a folder");
    let exchanges = on_ranks(2, |world| {
        let mut training = Training::new(world.clone(), &ModelOptions::on(mesh(1, 2)))?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        training.train(1)?;
        let before = world.ledger();
        training.save_in_background(&mut checkpoints)?;
        let calls = world.ledger().since(&before).channel(Channel::Control).calls;
        checkpoints.finish(&training.model)?;
        Ok(calls)
    });
    assert_eq!(exchanges, [2; 2]);
}
