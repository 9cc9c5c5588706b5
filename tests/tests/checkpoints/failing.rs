//! A save that fails on any rank, at any operation on its files, fails on all; what was there
//! stays, and training goes on.

use std::io;
use std::path::Path;
use std::sync::Arc;

use hsdp::{Error, ModelOptions};

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Saved};
use hsdp_checkpoint::{Disk, Files, Hash, Store};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use super::faulty::{Fault, Faulty};
use super::hooked::Hooked;
use super::training::Training;

const RANKS: usize = 4;

fn options() -> ModelOptions {
    ModelOptions::on(mesh(2, 2))
}

/// Bits of a rank after more training, and whether its fault has come.
type End = (Hash, bool);

/// Saves, and makes a step.
type Save = fn(&mut Training, &mut Checkpoints) -> Result<Saved, Error>;

fn and_wait(training: &mut Training, checkpoints: &mut Checkpoints) -> Result<Saved, Error> {
    let saved = training.save(checkpoints);
    training.train(1)?;
    saved
}

/// The step is made while it is saved.
fn in_background(training: &mut Training, checkpoints: &mut Checkpoints) -> Result<Saved, Error> {
    training.save_in_background(checkpoints)?;
    training.train(1)?;
    let told = checkpoints.poll(&training.model).transpose();
    let waited_for = checkpoints.finish(&training.model).transpose();
    match (told, waited_for) {
        (Some(told), None) | (None, Some(told)) => told,
        (told, waited_for) => panic!("told {told:?}, and then {waited_for:?}"),
    }
}

/// Saves twice, and has the `at`-th operation of a rank's fail in the second save.
fn fail_at(save: Save, culprit: usize, at: u64) -> Vec<End> {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("store");
    let graves = folder.path().join("graves");
    std::fs::create_dir(&graves).expect("a folder");
    let ended = on_ranks(RANKS, |world| {
        let rank = world.rank().index();
        let mut training = Training::new(world, &options())?;
        training.train(1)?;
        training.save(&mut training.checkpoints(&root)?)?;
        training.train(1)?;
        let faulty =
            Faulty::new(&graves, Fault::Fails, if rank == culprit { at } else { u64::MAX });
        let files: Arc<dyn Files> = Arc::new(faulty.clone());
        let with = CheckpointOptions { files, ..CheckpointOptions::default() };
        let opened = Checkpoints::open(&training.model, &root, with);
        let saved = match opened {
            Ok(mut checkpoints) => save(&mut training, &mut checkpoints),
            Err(error) => training.train(1).and(Err(error)),
        };
        let saved = saved.map(|saved| saved.step);
        let told = saved.map_err(|error| {
            assert!(!error.is_fatal(), "{error}");
            error.to_string()
        });
        training.save(&mut training.checkpoints(&root)?)?;
        Ok((told, (training.bits()?, faulty.has_come())))
    });
    let (told, ends): (Vec<_>, Vec<End>) = ended.into_iter().unzip();
    let told = common(told);
    let expected = if told.is_ok() { [2, 3] } else { [1, 3] };
    if let Err(told) = &told {
        let named = format!(" at step 2, on rank {culprit}: cannot ");
        assert!(told.contains(&named) && told.ends_with("the disk is full"), "{told}");
    }
    assert_eq!(steps(&root), expected, "rank {culprit}, operation {at}: {told:?}");
    ends
}

/// The generations that are there, all intact.
fn steps(root: &Path) -> Vec<u64> {
    let store = Store::new(root, Arc::new(Disk));
    let steps = store.steps().expect("listed");
    for step in &steps {
        assert!(store.open(*step).expect("intact").verify().is_empty());
    }
    steps
}

#[test]
fn row_37_a_full_disk_on_any_rank_at_any_operation_fails_the_save_and_nothing_else() {
    fail_everywhere(and_wait);
}

#[test]
fn row_37_a_full_disk_fails_a_save_in_the_background_and_nothing_else() {
    fail_everywhere(in_background);
}

fn fail_everywhere(save: Save) {
    let without = |culprit| bits(fail_at(save, culprit, u64::MAX));
    let expected = common(vec![without(0), without(1)]);
    for culprit in 0..RANKS {
        let mut operations = 0;
        loop {
            let ends = fail_at(save, culprit, operations);
            let has_come = ends[culprit].1;
            assert_eq!(bits(ends), expected, "rank {culprit}, operation {operations}");
            if !has_come {
                break;
            }
            operations += 1;
        }
        assert!(operations > 15, "rank {culprit}: {operations} operations");
    }
}

fn bits(ends: Vec<End>) -> Vec<Hash> {
    ends.into_iter().map(|(bits, _)| bits).collect()
}

/// What cannot be removed is told, takes room, and is in nobody's way; it goes when it can be.
#[test]
fn what_cannot_be_removed_keeps_nobody_from_saving() {
    let folder = tempfile::tempdir().expect("a folder");
    let hidden = || {
        let entries = std::fs::read_dir(folder.path()).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        names.filter(|name| name.to_string_lossy().starts_with('.')).count()
    };
    on_ranks(RANKS, |world| {
        let mut training = Training::new(world, &options())?;
        let files = Hooked::by(|operation, path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            match operation {
                "remove" if name.starts_with('.') => Err(io::Error::other("it is held open")),
                _ => Ok(()),
            }
        });
        let with = CheckpointOptions { files: Arc::new(files), ..CheckpointOptions::default() };
        for _ in 0..4 {
            training.train(1)?;
            let opened = Checkpoints::open(&training.model, folder.path(), with.clone());
            training.save(&mut opened?)?;
        }
        Ok(())
    });
    assert_eq!((steps(folder.path()), hidden()), (vec![3, 4], 2));
    on_ranks(1, |world| {
        let training = Training::new(world, &ModelOptions::on(mesh(1, 1)))?;
        training.checkpoints(folder.path()).map(drop)
    });
    assert_eq!(hidden(), 0);
}
