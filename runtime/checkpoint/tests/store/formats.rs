//! Generations that a newer version wrote: they are told apart from damage, and nothing takes their
//! place.

use hsdp_checkpoint::{
    Elements, Error, Head, Lease, OptimizerHead, Slice, Store, TrainingHead, Writer,
};
use serde_json::json;

use super::fixture::{Fixture, save};

/// Makes the format of a step 9. A later format may have fields that this one does not have.
fn make_newer(fixture: &Fixture, step: u64) {
    fixture.rewrite(step, |value| value.replace("\"format\":1", "\"format\":9,\"more\":[]"));
}

fn assert_newer(fixture: &Fixture, step: u64, error: &Error) {
    let path = fixture.manifest(step);
    let expected = format!(
        "{}: this checkpoint was written by a newer version: format 9, this program reads up to 5",
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
    assert_newer(&fixture, 2, &store.newest().expect_err("newer"));
    assert_newer(&fixture, 2, &store.latest().expect_err("newer"));
    let older = store.open(1).expect("intact");
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
    let newest = fixture.store().newest().expect("listed");
    assert_eq!(newest.generation.expect("the one before").manifest().step, 1);
}

/// Saves a step without its frozen parameters.
fn save_trainable(lease: &mut Lease, step: u64) {
    let draft = lease.begin(step).expect("new");
    let whole = Slice { tensor: "w", shape: &[2], offset: 0, values: Elements::F32(&[1.0, 2.0]) };
    draft.place().write(Writer { index: 0, of: 1 }, &[whole]).expect("written");
    let head = Head { frozen_digest: Some(u64::MAX), ..Head::of_step(step) };
    draft.commit(head, 1).expect("whole");
}

/// So that programs that know format 1 alone read all others, and refuse these by the number.
#[test]
fn only_a_checkpoint_without_its_frozen_parameters_has_format_2() {
    let fixture = Fixture::saved(&[1]);
    let mut lease = fixture.store().lease("test").expect("free");
    save_trainable(&mut lease, 2);
    let store = fixture.store();
    let digests = [1, 2].map(|step| store.open(step).expect("read").manifest().frozen_digest);
    assert_eq!(digests, [None, Some(u64::MAX)]);
    let text = |step| std::fs::read_to_string(fixture.manifest(step)).expect("read");
    assert!(text(1).contains("\"format\":1,") && !text(1).contains("frozen_digest"));
    assert!(text(2).contains("\"format\":2,") && text(2).contains("\"frozen_digest\":"));
}

#[test]
fn a_digest_in_format_1_and_format_2_without_one_are_damage() {
    let fixture = Fixture::saved(&[1, 2]);
    fixture.rewrite(1, |value| value.replace("\"format\":1", "\"format\":2"));
    fixture.rewrite(2, |value| value.replace("\"files\":", "\"frozen_digest\":7,\"files\":"));
    for (step, format) in [(1, 2), (2, 1)] {
        let told = fixture.store().open(step).expect_err("it is neither");
        assert!(told.is_damage());
        let expected = format!("its format is {format}, and only format 2 has a frozen_digest");
        assert!(told.to_string().ends_with(&expected), "{told}");
    }
}

/// Saves a step with a number of applied steps.
fn save_applied(lease: &mut Lease, step: u64, applied_steps: u64) {
    let draft = lease.begin(step).expect("new");
    let whole = Slice { tensor: "w", shape: &[2], offset: 0, values: Elements::F32(&[1.0, 2.0]) };
    draft.place().write(Writer { index: 0, of: 1 }, &[whole]).expect("written");
    let head = Head::of_step(step);
    let training = TrainingHead { applied_steps: Some(applied_steps), ..head.training };
    let updates = [("w".to_owned(), 5), ("v".to_owned(), 7)].into();
    let optimizer = OptimizerHead {
        kind: "adamw".to_owned(),
        options: json!({}),
        made_with: Some(json!({})),
        updates,
        is_open: false,
    };
    let optimizer = Some(optimizer);
    draft.commit(Head { training, optimizer, ..head }, 1).expect("whole");
}

#[test]
fn only_a_checkpoint_with_a_number_of_applied_steps_has_format_3() {
    let fixture = Fixture::saved(&[1]);
    let mut lease = fixture.store().lease("test").expect("free");
    save_applied(&mut lease, 10, 6);
    let text = |step| std::fs::read_to_string(fixture.manifest(step)).expect("read");
    assert!(text(1).contains("\"format\":1,") && !text(1).contains("applied_steps"));
    assert!(text(10).contains("\"format\":3,") && text(10).contains("\"applied_steps\":6"));
    let applied = |step| fixture.store().open(step).expect("read").manifest().applied_steps();
    assert_eq!([applied(1), applied(10)], [1, 6]);
    // An older format counts the updates of parameters alone.
    fixture.rewrite(10, |value| {
        let value = value.replace("\"format\":3", "\"format\":1");
        value.replace(",\"applied_steps\":6", "").replace("\"made_with\":{},", "")
    });
    assert_eq!(applied(10), 7);
}

#[test]
fn numbers_of_applied_steps_that_cannot_be_are_damage() {
    let with = |from: &'static str, to: &'static str| move |value: &str| value.replace(from, to);
    for (change, problem) in [
        (with("\"format\":3", "\"format\":1"), "its format is 1, and only format 3 has made_with"),
        (with("\"applied_steps\":6", "\"applied_steps\":11"), "11 of 10 steps were applied"),
        (with(",\"applied_steps\":6", ""), "its format is 3, and applied_steps is missing"),
    ] {
        let fixture = Fixture::saved(&[1]);
        let mut lease = fixture.store().lease("test").expect("free");
        save_applied(&mut lease, 10, 6);
        fixture.rewrite(10, change);
        let told = fixture.store().open(10).expect_err("it cannot be");
        assert!(told.is_damage() && told.to_string().ends_with(problem), "{told}");
    }
}

/// Saves a step of a model with settings.
fn save_stated(lease: &mut Lease, step: u64) {
    let draft = lease.begin(step).expect("new");
    let whole = Slice { tensor: "w", shape: &[2], offset: 0, values: Elements::F32(&[1.0, 2.0]) };
    draft.place().write(Writer { index: 0, of: 1 }, &[whole]).expect("written");
    let head = Head::of_step(step);
    let training = TrainingHead { applied_steps: Some(step), ..head.training };
    let settings = [("heads", "4"), ("eps", "1e-6")];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    draft.commit(Head { training, settings, ..head }, 1).expect("whole");
}

#[test]
fn only_a_checkpoint_with_settings_has_format_4() {
    let fixture = Fixture::saved(&[1]);
    let mut lease = fixture.store().lease("test").expect("free");
    save_stated(&mut lease, 2);
    let text = |step| std::fs::read_to_string(fixture.manifest(step)).expect("read");
    assert!(!text(1).contains("settings"));
    assert!(text(2).contains("\"format\":4,"));
    let settings = |step| fixture.store().open(step).expect("read").manifest().settings.clone();
    assert!(settings(1).is_empty());
    assert_eq!(settings(2)["heads"], "4");
    assert_eq!(settings(2).len(), 2);
}

#[test]
fn settings_that_cannot_be_are_damage() {
    let with = |from: &'static str, to: &'static str| move |value: &str| value.replace(from, to);
    let all = "\"settings\":{\"eps\":\"1e-6\",\"heads\":\"4\"},";
    for (change, problem) in [
        (with("\"format\":4", "\"format\":3"), "its format is 3, and only format 4 has settings"),
        (with(all, ""), "its format is 4, and settings are missing"),
        (with(all, "\"settings\":{},"), "its format is 4, and settings are missing"),
        (with(",\"applied_steps\":2", ""), "its format is 4, and applied_steps is missing"),
        (with("\"eps\"", "\"heads\""), "`heads` is there twice at line 1"),
    ] {
        let fixture = Fixture::saved(&[1]);
        let mut lease = fixture.store().lease("test").expect("free");
        save_stated(&mut lease, 2);
        fixture.rewrite(2, change);
        let told = fixture.store().open(2).expect_err("it cannot be");
        assert!(told.is_damage() && told.to_string().contains(problem), "{told}");
    }
}

/// Saves a step of a model with two buffers.
fn save_with_buffers(lease: &mut Lease, step: u64) {
    let draft = lease.begin(step).expect("new");
    let slice = |tensor| Slice { tensor, shape: &[2], offset: 0, values: (&[1.0, 2.0][..]).into() };
    let whole = ["w", "mean", "var"].map(slice);
    draft.place().write(Writer { index: 0, of: 1 }, &whole).expect("written");
    let head = Head::of_step(step);
    let training = TrainingHead { applied_steps: Some(step), ..head.training };
    let buffers = ["mean", "var"].map(str::to_owned).into();
    draft.commit(Head { training, buffers, ..head }, 1).expect("whole");
}

#[test]
fn only_a_checkpoint_with_buffers_has_format_5() {
    let fixture = Fixture::saved(&[1]);
    let mut lease = fixture.store().lease("test").expect("free");
    let text = |step| std::fs::read_to_string(fixture.manifest(step)).expect("read");
    assert!(!text(1).contains("buffers"));
    save_stated(&mut lease, 2);
    save_with_buffers(&mut lease, 3);
    assert!(!text(2).contains("buffers"));
    assert!(text(2).contains("\"format\":4,") && text(3).contains("\"format\":5,"));
    let manifest = |step| fixture.store().open(step).expect("read").manifest().clone();
    assert!(manifest(2).buffers.is_empty());
    assert_eq!(manifest(3).buffers, ["mean", "var"].map(str::to_owned).into());
    // It may have settings besides.
    fixture
        .rewrite(3, |value| value.replace("\"buffers\"", "\"settings\":{\"a\":\"b\"},\"buffers\""));
    assert_eq!((manifest(3).settings.len(), manifest(3).buffers.len()), (1, 2));
}

#[test]
fn buffers_that_cannot_be_are_damage() {
    let with = |from: &'static str, to: &'static str| move |value: &str| value.replace(from, to);
    let all = "\"buffers\":[\"mean\",\"var\"],";
    for (change, problem) in [
        (with("\"format\":5", "\"format\":3"), "its format is 3, and only format 5 has buffers"),
        (with(all, ""), "its format is 5, and buffers are missing"),
        (with(all, "\"buffers\":[],"), "its format is 5, and buffers are missing"),
        (with(",\"applied_steps\":2", ""), "its format is 5, and applied_steps is missing"),
        (with("[\"mean\",\"var\"]", "[\"mean\",\"mean\"]"), "`mean` is there twice at line 1"),
        (with("[\"mean\",\"var\"]", "[\"lost\"]"), "buffer `lost` is no tensor of the model"),
    ] {
        let fixture = Fixture::saved(&[1]);
        let mut lease = fixture.store().lease("test").expect("free");
        save_with_buffers(&mut lease, 2);
        fixture.rewrite(2, change);
        let told = fixture.store().open(2).expect_err("it cannot be");
        assert!(told.is_damage() && told.to_string().contains(problem), "{told}");
    }
}
