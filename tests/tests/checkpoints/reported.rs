//! The end of a save in the background: its failure is the error of the next call, whichever it is,
//! on all ranks.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{Error, ModelOptions};
use hsdp_checkpoint::{Disk, Store};
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use serde_json::{Value, json};

use super::hooked::{Gate, Hooked};
use super::training::Training;

const RANKS: usize = 2;

fn options() -> ModelOptions {
    ModelOptions::on(mesh(1, RANKS))
}

/// Opens checkpoints. Their `failing`-th save, counted from 0, fails, because rank 1 cannot make
/// its first file.
fn failing_once(training: &Training, root: &Path, failing: u64) -> Result<Checkpoints, Error> {
    let rank = training.model.rank().index();
    let saves = AtomicU64::new(0);
    let files = Hooked::by(move |operation, path| {
        let is_data = path.extension().is_some_and(|it| it == "safetensors");
        if operation == "create"
            && is_data
            && saves.fetch_add(1, Ordering::Relaxed) == failing
            && rank == 1
        {
            return Err(io::Error::other("this one fails"));
        }
        Ok(())
    });
    let options = CheckpointOptions { files: Arc::new(files), ..CheckpointOptions::default() };
    Checkpoints::open(&training.model, root, options)
}

fn steps(root: &Path) -> Vec<u64> {
    Store::new(root, Arc::new(Disk)).steps().expect("listed")
}

/// A call that waits for a save that is under way.
type Call = fn(&mut Training, &mut Checkpoints) -> Result<(), Error>;

const CALLS: [Call; 5] = [
    |training, checkpoints| training.save(checkpoints).map(drop),
    |training, checkpoints| training.save_in_background(checkpoints),
    |training, checkpoints| checkpoints.finish(&training.model).map(drop),
    |Training { model, optimizer }, checkpoints| {
        checkpoints.load_latest(model, optimizer).map(drop)
    },
    |Training { model, optimizer }, checkpoints| checkpoints.load(model, optimizer, 0).map(drop),
];

#[test]
fn the_next_call_returns_a_failure_and_does_nothing_else_and_the_one_after_it_works() {
    for call in CALLS {
        let folder = tempfile::tempdir().expect("a folder");
        let told = on_ranks(RANKS, |world| {
            let mut training = Training::new(world, &options())?;
            let mut checkpoints = failing_once(&training, folder.path(), 1)?;
            training.save(&mut checkpoints)?;
            training.train(1)?;
            training.save_in_background(&mut checkpoints)?;
            training.train(1)?;
            let bits = training.bits()?;
            let told = call(&mut training, &mut checkpoints).expect_err("the save has failed");
            assert_eq!(training.bits()?, bits, "nothing is loaded");
            assert_eq!(steps(folder.path()), [0], "nothing is saved");
            call(&mut training, &mut checkpoints)?;
            checkpoints.finish(&training.model)?;
            Ok(told.to_string())
        });
        let told = common(told);
        assert!(told.starts_with("saving at step 1, on rank 1: cannot create "), "{told}");
        assert!(told.ends_with("this one fails"), "{told}");
    }
}

#[test]
fn a_failure_is_one_warning_however_many_ranks_there_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let warned = on_ranks(RANKS, |world| {
        let training = Training::new(world, &options())?;
        let mut checkpoints = failing_once(&training, folder.path(), 0)?;
        training.save_in_background(&mut checkpoints)?;
        let said = Said::default();
        let finish = || checkpoints.finish(&training.model).expect_err("the save has failed");
        tracing::subscriber::with_default(said.clone(), finish);
        Ok(said.warnings().into_iter().map(|(said, _)| said).collect::<Vec<_>>())
    });
    let [warned, others] = &warned[..] else { panic!("two ranks") };
    assert!(matches!(&warned[..], [one] if one.contains("a checkpoint failed")), "{warned:?}");
    assert_eq!(others, &[] as &[String]);
}

/// `poll` does not wait, so it returns the failure once all ranks have ended.
#[test]
fn a_poll_returns_a_failure_once() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = failing_once(&training, folder.path(), 0)?;
        training.save_in_background(&mut checkpoints)?;
        let told = loop {
            training.train(1)?;
            match checkpoints.poll(&training.model) {
                Ok(saved) => assert_eq!(saved, None),
                Err(error) => break error.to_string(),
            }
        };
        assert!(told.ends_with("this one fails"), "{told}");
        assert_eq!(checkpoints.poll(&training.model)?, None);
        assert_eq!(checkpoints.finish(&training.model)?, None);
        Ok(())
    });
}

#[test]
fn a_success_waits_while_a_later_failure_is_returned_first() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = failing_once(&training, folder.path(), 2)?;
        for _ in 0..3 {
            training.train(1)?;
            training.save_in_background(&mut checkpoints)?;
        }
        checkpoints.finish(&training.model).expect_err("the third one has failed");
        for expected in [Some(1), Some(2), None] {
            let saved = checkpoints.finish(&training.model)?;
            assert_eq!(saved.map(|saved| saved.step), expected);
        }
        Ok(())
    });
}

#[test]
fn a_load_waits_for_a_save_that_is_under_way() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        training.train(2)?;
        let bits = training.bits()?;
        training.save_in_background(&mut checkpoints)?;
        training.train(1)?;
        let Training { model, optimizer } = &mut training;
        assert_eq!(checkpoints.load_latest(model, optimizer)?.map(|it| it.step), Some(2));
        assert_eq!(training.bits()?, bits);
        assert_eq!(checkpoints.poll(&training.model)?.map(|it| it.step), Some(2));
        Ok(())
    });
}

#[test]
fn a_value_that_is_too_large_is_refused_before_a_file_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = on_ranks(RANKS, |world| {
        let training = Training::new(world, &options())?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        let model = &training.model;
        let optimizer = &training.optimizer;
        let user = json!({ "a": "b".repeat(5_000_000) });
        let waited = checkpoints.save(model, optimizer, &user).map(drop);
        let begun = checkpoints.save_in_background(model, optimizer, &user);
        training.save(&mut checkpoints)?;
        Ok([waited, begun].map(|it| it.expect_err("too large").to_string()))
    });
    for told in common(told) {
        let expected = "the value `user` has 5000008 bytes as JSON, more than 4194304";
        assert!(told.ends_with(expected), "{told}");
    }
}

#[test]
fn a_drop_does_not_wait_for_a_save_and_warns_of_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let warned = on_ranks(RANKS, |world| {
        let gate = Gate::default();
        let mut training = Training::new(world, &options())?;
        let options = CheckpointOptions { files: gate.files(), ..CheckpointOptions::default() };
        let mut checkpoints = Checkpoints::open(&training.model, folder.path(), options)?;
        training.train(1)?;
        checkpoints.save_in_background(&training.model, &training.optimizer, &Value::Null)?;
        let said = Said::default();
        tracing::subscriber::with_default(said.clone(), || drop(checkpoints));
        // The thread that writes is still before the gate.
        gate.open();
        Ok(said.warnings().into_iter().map(|(said, _)| said).collect::<Vec<_>>())
    });
    let [warned] = &common(warned)[..] else { panic!("one warning is expected") };
    assert!(
        warned.contains("the last checkpoint may be missing step=1 what=it is given up"),
        "{warned}"
    );
}
