//! Generations that a newer version wrote: they are told apart from damage, and nothing takes their place.

use hsdp_checkpoint::{Error, Store};

use super::fixture::{Fixture, save};

/// Makes the format of a step 9. A later format may have fields that this one does not have.
fn make_newer(fixture: &Fixture, step: u64) {
    fixture.rewrite(step, |value| value.replace("\"format\":1", "\"format\":9,\"more\":[]"));
}

fn assert_newer(fixture: &Fixture, step: u64, error: &Error) {
    let path = fixture.manifest(step);
    let expected = format!(
        "{}: this checkpoint was written by a newer version: format 9, this program reads up to 1",
        path.display()
    );
    assert_eq!(error.to_string(), expected);
    assert!(!error.is_damage());
}

#[test]
fn row_36_the_checkpoint_of_a_newer_version_is_no_damage_and_no_older_one_takes_its_place() {
    let fixture = Fixture::saved(&[1, 2]);
    make_newer(&fixture, 2);
    let store = fixture.store();
    assert_newer(&fixture, 2, &store.open(2).expect_err("newer"));
    assert_newer(&fixture, 2, &store.newest(None).expect_err("newer"));
    assert_newer(&fixture, 2, &store.latest().expect_err("newer"));
    let older = store.newest(Some(2)).expect("asked for").generation.expect("intact");
    assert_eq!(older.manifest().step, 1);
}

#[test]
fn a_save_removes_no_checkpoint_of_a_newer_version() {
    let fixture = Fixture::saved(&[1, 2, 3]);
    make_newer(&fixture, 1);
    make_newer(&fixture, 3);
    let store: Store = fixture.store();
    let mut lease = store.lease("test").expect("free");
    assert_newer(&fixture, 3, &save(&mut lease, 3).expect_err("newer"));
    (4..=7).for_each(|step| save(&mut lease, step).expect("saved"));
    assert_eq!(store.steps().expect("listed"), [1, 3, 6, 7]);
}

#[test]
fn a_format_before_the_first_one_is_damage() {
    let fixture = Fixture::saved(&[1, 2]);
    fixture.rewrite(2, |value| value.replace("\"format\":1", "\"format\":0"));
    let told = fixture.store().open(2).expect_err("no format").to_string();
    assert!(told.ends_with("its format is 0; the first one was 1"), "{told}");
    let newest = fixture.store().newest(None).expect("listed");
    assert_eq!(newest.generation.expect("the one before").manifest().step, 1);
}
