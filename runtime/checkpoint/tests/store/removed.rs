//! A generation that its writer removes while it is read is no damage, and later ones are discarded
//! where that is asked for.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use hsdp_checkpoint::{Disk, Error, Store, Weights, export};

use super::fixture::{Fixture, flip_bit, save};
use super::hooked::Hooked;

fn is_removed(error: &Error, fixture: &Fixture, step: u64) -> bool {
    matches!(error, Error::Removed { path } if *path == fixture.path(step)) && !error.is_damage()
}

#[test]
fn every_reader_of_an_opened_generation_says_that_it_was_removed() {
    for is_replaced in [false, true] {
        let fixture = Fixture::saved(&[1, 2]);
        let generation = fixture.store().open(2).expect("there");
        fs::remove_dir_all(fixture.path(2)).expect("removed");
        if is_replaced {
            let mut lease = fixture.store().lease("test").expect("free");
            save(&mut lease, 3).expect("saved");
            fs::rename(fixture.path(3), fixture.path(2)).expect("in its place");
        }
        let told = |error: Error| assert!(is_removed(&error, &fixture, 2), "{error}");
        told(generation.read("w", 0, &mut [0.0]).expect_err("it is gone"));
        told(generation.for_each_chunk("w", |_| Ok::<_, Error>(())).expect_err("it is gone"));
        let verified = generation.verify();
        assert!(matches!(&verified[..], [one] if is_removed(one, &fixture, 2)), "{verified:?}");
        let to = fixture.folder.path().join("model");
        told(export(&generation, &Disk, &to, Weights::Trained, 1 << 30).expect_err("gone"));
        let left = fs::read_dir(fixture.folder.path()).expect("there");
        let left = left.map(|entry| entry.expect("an entry").file_name());
        assert!(left.into_iter().all(|name| !name.to_string_lossy().contains("model")));
    }
}

#[test]
fn what_is_in_its_place_and_broken_is_damage() {
    let fixture = Fixture::saved(&[1, 2]);
    let store = fixture.store();
    let generation = store.open(2).expect("there");
    flip_bit(&fixture.file(2), fs::metadata(fixture.file(2)).expect("there").len() - 1);
    assert!(generation.verify().iter().all(Error::is_damage));
    fs::remove_file(fixture.manifest(2)).expect("removed");
    assert!(generation.verify().iter().all(Error::is_damage));
    let error = store.open(2).expect_err("it has no manifest");
    assert!(error.is_damage() && !error.is_absence(), "{error}");
}

/// A store whose writer removes the newest generation, and saves another, before a reader opens the
/// file of that name.
fn removing(fixture: &Fixture, name: &'static str) -> Store {
    let of = fixture.store();
    let has_removed = AtomicBool::new(false);
    let path = fixture.path(2);
    let files = Hooked::by(move |operation, opened| {
        let is_meant =
            operation == "open" && opened.parent() == Some(&path) && opened.ends_with(name);
        if is_meant && !has_removed.swap(true, Ordering::SeqCst) {
            let mut lease = of.lease("test").expect("free");
            (3..=4).for_each(|step| save(&mut lease, step).expect("saved"));
        }
        Ok(())
    });
    Store::new(fixture.folder.path(), Arc::new(files))
}

#[test]
fn a_generation_that_goes_while_it_is_opened_is_not_broken_and_the_newest_is_found() {
    for name in ["manifest.json", "r00000-of-00002.safetensors", "r00001-of-00002.safetensors"] {
        let fixture = Fixture::saved(&[1, 2]);
        let error = removing(&fixture, name).open(2).expect_err("it is gone");
        assert!(is_removed(&error, &fixture, 2), "{name}: {error}");
        let fixture = Fixture::saved(&[1, 2]);
        let found = removing(&fixture, name).newest().expect("found");
        let step = found.generation.map(|generation| generation.manifest().step);
        assert_eq!((step, found.broken.len()), (Some(4), 0), "{name}");
    }
}

#[test]
fn a_generation_that_is_listed_late_is_found_under_its_name() {
    let fixture = Fixture::saved(&[1, 2]);
    let root = fixture.folder.path().to_owned();
    let files = Hooked::by(move |operation, path| match operation {
        "list" if path == root => Err(io::ErrorKind::NotFound.into()),
        _ => Ok(()),
    });
    let store = Store::new(fixture.folder.path(), Arc::new(files));
    assert_eq!(store.steps().expect("listed"), [0_u64; 0]);
    assert!(store.has(2).expect("looked") && !store.has(3).expect("looked"));
    assert_eq!(store.open(2).expect("there").manifest().step, 2);
    let error = store.open(3).expect_err("it is not there");
    assert!(matches!(error, Error::NoSuchStep { step: 3, .. }), "{error}");
}

/// Without a second look some of these readers find damage.
#[test]
fn readers_beside_a_writer_find_no_damage() {
    let fixture = Fixture::saved(&[1, 2]);
    let store = fixture.store();
    let has_ended = AtomicBool::new(false);
    let looks = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !has_ended.load(Ordering::SeqCst) {
                    for step in store.steps().expect("listed") {
                        let wrong = match store.open(step) {
                            Ok(generation) => generation.verify(),
                            Err(error) => vec![error],
                        };
                        assert!(wrong.iter().all(Error::is_absence), "step {step}: {wrong:?}");
                    }
                    let newest = store.latest().expect("no damage").expect("never empty");
                    assert!(newest.manifest().step > 0);
                    looks.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let mut lease = store.lease("test").expect("free");
        (3..=150).for_each(|step| save(&mut lease, step).expect("saved"));
        has_ended.store(true, Ordering::SeqCst);
    });
    assert!(looks.into_inner() > 3);
}

#[test]
fn later_generations_are_discarded_and_the_link_points_to_the_last_that_is_left() {
    let fixture = Fixture::saved(&[1, 2, 3, 4]);
    let store = fixture.store().keeping(9);
    let mut lease = store.lease("test").expect("free");
    fs::remove_file(fixture.manifest(3)).expect("broken ones are discarded, too");
    let refused = lease.discard_after(5).expect_err("there is no such step");
    assert!(matches!(refused, Error::NoSuchStep { step: 5, .. }), "{refused}");
    assert!(lease.discard_after(3).expect_err("it is broken").is_damage());
    assert_eq!(store.steps().expect("listed"), [1, 2, 3, 4]);
    lease.note_broken(1);
    let refused = lease.discard_after(1).expect_err("a load has found it broken");
    assert!(refused.is_damage() && store.steps().expect("listed") == [1, 2, 3, 4], "{refused}");
    assert_eq!(lease.discard_after(2).expect("discarded"), [3, 4]);
    assert_eq!(lease.discard_after(2).expect("none is later"), [0_u64; 0]);
    assert_eq!(store.steps().expect("listed"), [1, 2]);
    let link = fs::read_link(fixture.folder.path().join("latest")).expect("a link");
    assert_eq!(link, Path::new("step-00000002"));
    save(&mut lease, 3).expect("no later one is there");
    assert_eq!(store.steps().expect("listed"), [1, 2, 3]);
}

#[test]
fn an_export_may_have_the_longest_name_that_a_file_may_have() {
    let fixture = Fixture::saved(&[1]);
    let generation = fixture.store().open(1).expect("there");
    for length in [1, 14, 15, 229, 230, 255] {
        let to = fixture.folder.path().join("m".repeat(length));
        export(&generation, &Disk, &to, Weights::Trained, 1 << 30).expect("exported");
        assert!(to.join("model.safetensors").exists());
    }
    let to = fixture.folder.path().join("m".repeat(256));
    export(&generation, &Disk, &to, Weights::Trained, 1 << 30).expect_err("too long");
}
