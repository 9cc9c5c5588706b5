//! Sizes that are refused before memory is taken for them. The tests measure the memory of their
//! process, so each runs alone in it.

#[allow(dead_code)]
#[path = "store/fixture.rs"]
mod fixture;

use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hsdp_checkpoint::{Disk, Error, Folder, Head, Lease, MOST_USER_BYTES};
use serde_json::Value;

use fixture::{Fixture, ONLY, save, whole};

/// The right to run, and to measure the memory of the process, which all tests in here share.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `act` returns, once it has taken less memory than `most` megabytes.
fn within<T>(most: usize, act: impl FnOnce() -> T) -> T {
    let kilobytes = |field: &str| -> usize {
        let status = fs::read_to_string("/proc/self/status").expect("Linux");
        let line = status.lines().find(|line| line.starts_with(field)).expect("a field");
        line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
    };
    // The largest memory of the process so far is forgotten.
    fs::write("/proc/self/clear_refs", "5").expect("Linux");
    let before = kilobytes("VmRSS:");
    let result = act();
    let peak = kilobytes("VmHWM:").saturating_sub(before) / 1024;
    assert!(peak < most, "{peak} MB");
    result
}

fn told<T>(refused: Result<T, Error>) -> String {
    refused.err().expect("refused").to_string()
}

/// `piece` again and again, in 8 MiB of text.
fn many(piece: &str) -> String {
    piece.repeat((8 << 20) / piece.len())
}

#[test]
fn a_manifest_of_empty_values_takes_no_memory_but_its_own() {
    let _alone = alone();
    let fixture = Fixture::saved(&[1]);
    for value in [format!("[{}[]]", many("[],")), format!("[{}{{}}]", many("{\"\":0},"))] {
        fixture.rewrite(1, |text| text.replace("\"user\":null", &format!("\"user\":{value}")));
        let refused = within(40, || told(fixture.store().open(1)));
        assert!(
            refused.contains(&format!("bytes of JSON, more than {MOST_USER_BYTES}")),
            "{refused}"
        );
        fixture.rewrite(1, |text| text.replace(&value, "null"));
    }
}

#[test]
fn a_shape_of_many_dims_takes_no_memory_but_its_own() {
    let _alone = alone();
    let fixture = Fixture::saved(&[1]);
    let shape = format!("[{}10,3]", many("1,"));
    fixture.rewrite(1, |text| text.replace("[10,3]", &shape));
    let refused = within(40, || told(fixture.store().open(1)));
    assert!(refused.contains("a tensor has more than 64 dims"), "{refused}");
}

#[test]
fn a_sparse_manifest_is_not_read() {
    let _alone = alone();
    let fixture = Fixture::saved(&[1]);
    let file = fs::OpenOptions::new().write(true).open(fixture.manifest(1)).expect("there");
    file.set_len(1 << 40).expect("sparse");
    let refused = within(40, || told(fixture.store().open(1)));
    assert!(
        refused.ends_with("it has 1099511627776 bytes; at most 268435456 are read"),
        "{refused}"
    );
}

#[test]
fn the_header_of_a_foreign_file_takes_a_few_times_its_own_memory() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let tensor =
        |shape: &str| format!(r#"{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}"#);
    let texts: String = many(r#""k":"","#);
    for (header, expected) in [
        (tensor(&format!("[{}0]", many("1,"))), "a tensor has more than 64 dims"),
        (tensor(&format!("[{}0]", many("[],"))), "invalid type: sequence"),
        (format!(r#"{{"a":[{}0]}}"#, many("[],")), "expected value"),
        (format!(r#"{{"a":{{"b":[{}0]}}}}"#, many("[],")), "unknown field `b`"),
        (format!(r#"{{"__metadata__":{{{texts}"k":0}}}}"#), "invalid type: integer"),
    ] {
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        fs::write(folder.path().join("model.safetensors"), bytes).expect("written");
        let refused = within(40, || told(Folder::open(Arc::new(Disk), folder.path())));
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn the_metadata_of_an_index_takes_no_memory() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let index = format!(r#"{{"metadata":{{"a":[{}0]}},"weight_map":7}}"#, many("[],"));
    fs::write(folder.path().join("model.safetensors.index.json"), index).expect("written");
    let refused = within(40, || told(Folder::open(Arc::new(Disk), folder.path())));
    assert!(refused.contains("invalid type: integer `7`"), "{refused}");
}

#[test]
fn a_name_that_is_there_twice_is_refused() {
    let _alone = alone();
    let fixture = Fixture::saved(&[1]);
    fixture.rewrite(1, |text| {
        text.replace(
            "\"tensors\":{",
            "\"tensors\":{\"w\":{\"shape\":[0],\"dtype\":\"F32\",\"chunks\":[]},",
        )
    });
    let refused = told(fixture.store().open(1));
    assert!(refused.contains("`w` is there twice"), "{refused}");
}

#[test]
fn chunks_that_share_bytes_of_a_file_are_refused() {
    let _alone = alone();
    let fixture = Fixture::saved(&[1]);
    fixture.rewrite(1, |text| {
        let mut value: Value = serde_json::from_str(text).expect("JSON");
        for twin in 0..9 {
            value["tensors"][format!("twin {twin}")] = value["tensors"]["w"].clone();
        }
        value.to_string()
    });
    let refused = told(fixture.store().open(1));
    assert!(refused.contains("its chunks have"), "{refused}");
}

fn commit(lease: &mut Lease, user: Value) -> Result<(), Error> {
    let draft = lease.begin(1)?;
    draft.place().write(ONLY, &[whole()])?;
    draft.commit(Head { user, ..Head::of_step(1) }, 1).map(drop)
}

#[test]
fn a_value_that_a_reader_would_refuse_is_not_written() {
    let _alone = alone();
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    let text = |bytes: usize| Value::String("a".repeat(bytes - 2));
    let refused = told(commit(&mut lease, text(MOST_USER_BYTES + 1)));
    assert!(refused.contains("a value has 4194305 bytes of JSON, more than 4194304"), "{refused}");
    assert_eq!(fixture.store().steps().expect("listed"), [0_u64; 0]);
    commit(&mut lease, text(MOST_USER_BYTES)).expect("saved");
    save(&mut lease, 2).expect("saved");
}
