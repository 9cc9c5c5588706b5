//! A save that is ended at any of its operations, in any way, leaves the generation before or the
//! new one: bit for bit, never a mix.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use hsdp_checkpoint::{Disk, Error, Files, Head, Lease, Slice, Store, Writer, state_tensor};

use super::faulty::{Fault, Faulty, Loss};

const LEN: usize = 30;
const WRITERS: usize = 3;

/// Elements of a step: each tells step and place.
fn elements(step: u64) -> Vec<f32> {
    (0..LEN).map(|place| (step * 1000) as f32 + place as f32).collect()
}

/// Saves a step: each writer has a third of a tensor, and of a state of it.
fn save(lease: &mut Lease, step: u64) -> Result<Vec<Error>, Error> {
    let values = elements(step);
    let state = state_tensor("momentum", "w");
    let draft = lease.begin(step)?;
    for (index, third) in values.chunks(LEN / WRITERS).enumerate() {
        let offset = (index * third.len()) as u64;
        let slice = |tensor| Slice { tensor, shape: &[10, 3], offset, values: third.into() };
        let writer = Writer { index, of: WRITERS };
        if let Err(error) = draft.place().write(writer, &[slice("w"), slice(&state)]) {
            draft.discard();
            return Err(error);
        }
    }
    Ok(draft.commit(Head::of_step(step), WRITERS)?.left_undone)
}

fn store(root: &Path, files: impl Files + 'static) -> Store {
    Store::new(root, Arc::new(files))
}

/// The step of the newest generation, all of whose elements and hashes are right.
fn newest(root: &Path) -> u64 {
    let found = store(root, Disk).newest().expect("listed");
    assert!(found.broken.is_empty(), "a generation has its name and is broken: {:?}", found.broken);
    let generation = found.generation.expect("there was one before");
    assert!(generation.verify().is_empty(), "{:?}", generation.verify());
    let step = generation.manifest().step;
    for tensor in ["w", &state_tensor("momentum", "w")] {
        let mut values = [0.0; LEN];
        generation.read(tensor, 0, &mut values).expect("readable");
        assert_eq!(values, *elements(step), "{tensor} of step {step}");
    }
    step
}

/// Two generations, and a save of a third that is ended at its `at`-th operation; whether it had so
/// many.
fn end_at(at: u64, fault: Fault, loss: Loss) -> bool {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("store");
    let graveyard = folder.path().join("graves");
    fs::create_dir(&graveyard).expect("a folder");
    let what = format!("{fault:?} at operation {at}, {loss:?} is lost");
    {
        let mut lease = store(&root, Disk).lease("before").expect("free");
        (1..=2).for_each(|step| drop(save(&mut lease, step).expect("saved")));
    }
    let faulty = Faulty::new(&graveyard, fault, at);
    let lease = store(&root, faulty.clone()).lease("ends");
    let saved = lease.and_then(|mut lease| save(&mut lease, 3));
    faulty.lose(loss);
    let found = newest(&root);
    match &saved {
        Ok(undone) => {
            assert_eq!(found, 3, "{what}: it was said to be saved");
            assert_eq!(undone.is_empty(), !faulty.has_come(), "{what}: {undone:?}");
        }
        Err(error) if fault == Fault::Fails => {
            assert_eq!(found, 2, "{what}: {error}");
            assert_eq!(hidden(&root), [""; 0], "{what}: {error}");
        }
        // Who is gone is told nothing: it may have died between the rename and its last word.
        Err(_) => assert!(found == 2 || found == 3, "{what}: step {found}"),
    }
    go_on(&root, &what);
    faulty.has_come()
}

/// The next job saves, and leaves nothing of what was left behind.
fn go_on(root: &Path, what: &str) {
    let mut lease = store(root, Disk).lease("after").expect("free");
    assert!(save(&mut lease, 4).expect("saved").is_empty(), "{what}");
    assert_eq!(newest(root), 4, "{what}");
    assert_eq!(hidden(root), [""; 0], "{what}");
    let kept = names(root).into_iter().filter(|name| name.starts_with("step-")).count();
    assert_eq!(kept, 2, "{what}: {:?}", names(root));
}

fn names(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root).expect("there");
    entries.map(|entry| entry.expect("there").file_name().to_string_lossy().into_owned()).collect()
}

/// What no reader looks at.
fn hidden(root: &Path) -> Vec<String> {
    names(root).into_iter().filter(|name| name.starts_with('.')).collect()
}

/// All operations of a save, one after the other; how many there are.
fn sweep(fault: Fault, loss: Loss) -> u64 {
    let ended = (0..).take_while(|at| end_at(*at, fault, loss)).count() as u64;
    assert!(ended > 30, "{ended} operations: the fault did not come");
    ended
}

#[test]
fn rows_37_and_38_whatever_operation_fails_the_save_fails_and_nothing_else() {
    sweep(Fault::Fails, Loss::Nothing);
}

#[test]
fn rows_34_and_44_a_process_that_dies_at_any_operation_leaves_one_of_two_generations() {
    sweep(Fault::Dies, Loss::Nothing);
}

#[test]
fn row_39_so_does_a_loss_of_power_at_any_operation() {
    let ended = sweep(Fault::Dies, Loss::Contents);
    assert_eq!(sweep(Fault::Dies, Loss::Entries), ended);
}

/// Saves four generations, and discards the last two by a process that ends at its `at`-th
/// operation. Returns whether that operation took place.
fn discard_until(at: u64, fault: Fault, loss: Loss) -> bool {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("store");
    let graveyard = folder.path().join("graves");
    fs::create_dir(&graveyard).expect("a folder");
    let what = format!("{fault:?} at operation {at}, {loss:?} is lost");
    {
        let mut lease = store(&root, Disk).keeping(9).lease("before").expect("free");
        (1..=4).for_each(|step| drop(save(&mut lease, step).expect("saved")));
    }
    let faulty = Faulty::new(&graveyard, fault, at);
    let lease = store(&root, faulty.clone()).keeping(9).lease("ends");
    let discarded = lease.and_then(|mut lease| lease.discard_after(2));
    faulty.lose(loss);
    let steps = store(&root, Disk).steps().expect("listed");
    let is_oldest = (2..=4).any(|last| steps.iter().copied().eq(1..=last));
    assert!(is_oldest, "{what}: {steps:?} is left");
    assert_eq!(newest(&root), steps[steps.len() - 1], "{what}");
    let latest = root.join("latest").join("manifest.json");
    assert!(latest.exists(), "{what}: the link points to a generation that is there");
    match discarded {
        Ok(discarded) => assert_eq!((&*discarded, &*steps), (&[3, 4][..], &[1, 2][..]), "{what}"),
        Err(error) => assert!(faulty.has_come(), "{what}: {error}"),
    }
    // The next job does it again, and goes on.
    let mut lease = store(&root, Disk).keeping(9).lease("after").expect("free");
    lease.discard_after(2).expect("discarded");
    assert!(save(&mut lease, 3).expect("saved").is_empty(), "{what}");
    assert_eq!(store(&root, Disk).steps().expect("listed"), [1, 2, 3], "{what}");
    assert_eq!((newest(&root), hidden(&root)), (3, Vec::new()), "{what}");
    faulty.has_come()
}

#[test]
fn later_generations_are_discarded_as_a_whole_or_again_by_the_next_job() {
    for (fault, loss) in [
        (Fault::Fails, Loss::Nothing),
        (Fault::Dies, Loss::Nothing),
        (Fault::Dies, Loss::Contents),
        (Fault::Dies, Loss::Entries),
    ] {
        let operations = (0..).take_while(|at| discard_until(*at, fault, loss)).count();
        assert!(operations > 8, "{operations} operations: the fault did not come");
    }
}

#[test]
fn power_that_goes_when_all_is_done_takes_nothing() {
    for loss in [Loss::Contents, Loss::Entries] {
        assert!(!end_at(u64::MAX, Fault::Dies, loss));
    }
}
