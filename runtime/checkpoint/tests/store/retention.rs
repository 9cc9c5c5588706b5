//! The newest readable generations stay, whatever else is there.

use std::fs;
use std::os::unix::fs::symlink;

use super::fixture::{Fixture, flip_bit, save};

#[test]
fn a_broken_generation_takes_the_place_of_no_readable_one() {
    let fixture = Fixture::saved(&[1, 2, 3]);
    fs::remove_file(fixture.manifest(2)).expect("removed");
    let bytes = fs::read(fixture.file(3)).expect("there");
    fs::write(fixture.file(3), &bytes[1..]).expect("written");
    let store = fixture.store();
    let mut lease = store.lease("test").expect("free");
    save(&mut lease, 4).expect("saved");
    assert_eq!(store.steps().expect("listed"), [1, 2, 3, 4], "2 and 3 are broken");
    save(&mut lease, 5).expect("saved");
    assert_eq!(
        store.steps().expect("listed"),
        [4, 5],
        "broken ones are removed with those older than 4"
    );
}

/// A hash that differs is found by reading all of a generation, so only a load finds it.
#[test]
fn a_generation_that_a_load_has_found_broken_does_not_count() {
    for is_noted in [false, true] {
        let fixture = Fixture::saved(&[1, 2]);
        flip_bit(&fixture.file(2), fs::metadata(fixture.file(2)).expect("there").len() - 1);
        let store = fixture.store();
        let mut lease = store.lease("test").expect("free");
        if is_noted {
            lease.note_broken(2);
        }
        save(&mut lease, 3).expect("saved");
        let expected = if is_noted { vec![1, 2, 3] } else { vec![2, 3] };
        assert_eq!(store.steps().expect("listed"), expected);
    }
}

#[test]
fn a_note_ends_when_a_save_takes_the_place_of_the_broken_one() {
    let fixture = Fixture::saved(&[1, 2]);
    flip_bit(&fixture.file(2), fs::metadata(fixture.file(2)).expect("there").len() - 1);
    let store = fixture.store();
    let mut lease = store.lease("test").expect("free");
    lease.note_broken(2);
    (2..=3).for_each(|step| save(&mut lease, step).expect("saved"));
    assert_eq!(store.steps().expect("listed"), [2, 3]);
}

#[test]
fn a_generation_whose_bytes_are_not_certainly_lost_stays() {
    let fixture = Fixture::saved(&[1, 2]);
    let elsewhere = fixture.folder.path().join("elsewhere");
    fs::rename(fixture.path(1), &elsewhere).expect("renamed");
    symlink(&elsewhere, fixture.path(1)).expect("linked");
    let store = fixture.store();
    let mut lease = store.lease("test").expect("free");
    for step in 3..=5 {
        let draft = lease.begin(step).expect("new");
        draft.place().write(super::fixture::ONLY, &[super::fixture::whole()]).expect("written");
        let undone = draft.commit(hsdp_checkpoint::Head::of_step(step), 1).expect("saved");
        let undone: Vec<String> = undone.left_undone.iter().map(ToString::to_string).collect();
        assert!(
            matches!(&undone[..], [link] if link.contains("its directory is a link")),
            "{undone:?}"
        );
    }
    assert_eq!(store.steps().expect("listed"), [1, 4, 5]);
    assert!(elsewhere.join("manifest.json").exists());
}
