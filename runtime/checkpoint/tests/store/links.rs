//! Links, FIFOs and directories in the places of files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use hsdp_checkpoint::{Disk, Error, Folder, Generation, LinkedDisk};

use super::fixture::{Fixture, elements, read};

fn make_fifo(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status().expect("mkfifo is there");
    assert!(made.success());
}

fn told<T>(refused: Result<T, Error>) -> String {
    refused.err().expect("refused").to_string()
}

#[test]
fn a_lease_that_is_a_link_is_not_written_through() {
    let fixture = Fixture::new();
    let elsewhere = fixture.folder.path().join("elsewhere");
    fs::write(&elsewhere, "something of value").expect("written");
    symlink(&elsewhere, fixture.folder.path().join("lease")).expect("linked");
    assert!(matches!(fixture.store().lease("test"), Err(Error::Io { action: "open", .. })));
    assert_eq!(fs::read(&elsewhere).expect("there"), b"something of value");
}

#[test]
fn a_lease_that_is_a_hard_link_is_not_written_through() {
    let fixture = Fixture::saved(&[1]);
    let lease = fixture.folder.path().join("lease");
    fs::remove_file(&lease).expect("removed");
    fs::hard_link(fixture.file(1), &lease).expect("linked");
    let told = told(fixture.store().lease("test"));
    assert!(told.ends_with("it has another name, by a hard link: remove this one"), "{told}");
    assert_eq!(read(&fixture.store().open(1).expect("intact"), "w"), elements(1, 30));
}

#[test]
fn a_lease_that_is_a_fifo_is_refused_at_once() {
    let fixture = Fixture::new();
    make_fifo(&fixture.folder.path().join("lease"));
    let told = told(fixture.store().lease("test"));
    assert!(told.ends_with("it is not a regular file"), "{told}");
}

/// A process that is being started has the open files of this one for a moment.
#[test]
fn a_lease_that_was_given_back_is_free_whatever_processes_begin() {
    let fixture = Fixture::new();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                Command::new("true").status().expect("it runs");
            }
        });
        let taken = (0..500).try_for_each(|_| fixture.store().lease("test").map(drop));
        is_over.store(true, Ordering::Relaxed);
        taken.expect("free");
    });
}

#[test]
fn a_holder_is_named_on_one_line_whatever_its_name() {
    let fixture = Fixture::new();
    let held = fixture.store().lease("a\njob\u{1b}[2J of \u{e4}").expect("free");
    let told = told(fixture.store().lease("second"));
    assert!(told.contains("is being written to by a\\njob\\u{1b}[2J of \u{e4}: a store"), "{told}");
    drop(held);
    let long = "\u{e4}".repeat(1000);
    let _held = fixture.store().lease(&long).expect("free");
    let told = super::links::told(fixture.store().lease("second"));
    assert!(told.contains("\u{e4}\u{e4}") && told.len() < 500, "{told}");
}

#[test]
fn a_link_in_the_place_of_a_file_or_a_generation_is_refused() {
    let fixture = Fixture::saved(&[1, 2]);
    let elsewhere = fixture.folder.path().join("elsewhere");
    for (path, expected) in [
        (fixture.file(2), "it is a link"),
        (fixture.manifest(2), "it is a link"),
        (fixture.path(2), "its directory is a link, or no directory"),
    ] {
        fs::rename(&path, &elsewhere).expect("renamed");
        symlink(&elsewhere, &path).expect("linked");
        let told = told(fixture.store().open(2));
        assert!(told.ends_with(expected), "{told}");
        let newest = fixture.store().newest().expect("listed");
        assert_eq!(newest.generation.expect("the one before").manifest().step, 1);
        fs::remove_file(&path).expect("removed");
        fs::rename(&elsewhere, &path).expect("renamed");
    }
    assert_eq!(read(&fixture.store().open(2).expect("intact"), "w"), elements(2, 30));
}

/// A person names the path of a store, so it may contain links.
#[test]
fn the_path_of_a_store_may_be_a_link() {
    let fixture = Fixture::saved(&[1]);
    let link = fixture.folder.path().join("link");
    symlink(fixture.folder.path(), &link).expect("linked");
    let there = Generation::open(Arc::new(Disk), &link.join("step-00000001")).expect("intact");
    assert_eq!(read(&there, "w"), elements(1, 30));
}

#[test]
fn a_fifo_or_a_directory_in_the_place_of_a_file_is_refused_at_once() {
    let fixture = Fixture::saved(&[1]);
    for path in [fixture.file(1), fixture.manifest(1)] {
        let bytes = fs::read(&path).expect("there");
        fs::remove_file(&path).expect("removed");
        make_fifo(&path);
        let refused = told(fixture.store().open(1));
        assert!(refused.ends_with("it is not a regular file"), "{refused}");
        fs::remove_file(&path).expect("removed");
        fs::create_dir(&path).expect("made");
        let refused = told(fixture.store().open(1));
        assert!(refused.ends_with("it is not a regular file"), "{refused}");
        fs::remove_dir(&path).expect("removed");
        fs::write(&path, bytes).expect("written");
    }
}

#[test]
fn a_fifo_or_a_device_in_a_folder_of_a_model_is_refused_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || told(Folder::open(Arc::new(LinkedDisk), folder.path()));
    for name in ["model.safetensors", "model.safetensors.index.json"] {
        let path = folder.path().join(name);
        make_fifo(&path);
        assert!(open().ends_with("it is not a regular file"), "{}", open());
        fs::remove_file(&path).expect("removed");
        symlink("/dev/zero", &path).expect("linked");
        assert!(open().ends_with("it is not a regular file"), "{}", open());
        fs::remove_file(&path).expect("removed");
    }
}
