//! The guarantees that a store gives its users, and exported folders.
//!
//! `fixture` has a store and changes of it, `hooked` a disk with a hook. `formats` are newer ones,
//! files of `links` are not regular, and files of `removed` are removed while they are read.
//! `tests/bounds.rs` (sizes, memory) uses `fixture`, too.

mod fixture;
mod formats;
mod hooked;
mod huggingface;
mod links;
mod removed;
mod retention;

use std::fs::{self, OpenOptions};
use std::path::Path;

use fixture::{Fixture, elements, flip_bit, read, save};
use half::{bf16, f16};
use hsdp_checkpoint::{Elements, Error, Fallback, Generation, Head, Manifest, Slice, Writer};
use serde_json::Value;

#[test]
fn what_was_saved_is_read_in_any_ranges() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    save(&mut lease, 7).expect("saved");
    let generation = fixture.store().open(7).expect("intact");
    let expected = elements(7, 30);
    for start in 0..30 {
        for end in start..=30 {
            let mut values = vec![f32::NAN; end - start];
            generation.read("w", start as u64, &mut values).expect("readable");
            assert_eq!(values, expected[start..end], "{start}..{end}");
        }
    }
    assert_eq!(read(&generation, "optimizer:exp_avg:w"), expected);
    assert!(generation.verify().is_empty());
}

#[test]
fn two_generations_are_kept_at_the_least_and_as_many_as_are_asked_for() {
    for (kept, expected) in [(0, vec![4, 5]), (2, vec![4, 5]), (3, vec![3, 4, 5])] {
        let fixture = Fixture::new();
        let store = fixture.store().keeping(kept);
        let mut lease = store.lease("test").expect("free");
        (1..=5).for_each(|step| save(&mut lease, step).expect("saved"));
        assert_eq!(store.steps().expect("listed"), expected);
        let latest = fs::read_link(fixture.folder.path().join("latest")).expect("a link");
        assert_eq!(latest, Path::new("step-00000005"));
    }
}

#[test]
fn a_generation_is_never_written_to_again_nor_one_before_it() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    save(&mut lease, 3).expect("saved");
    for step in [3, 2] {
        assert!(matches!(save(&mut lease, step), Err(Error::Exists { .. })));
        assert_eq!(read(&fixture.store().open(3).expect("intact"), "w"), elements(3, 30));
    }
}

#[test]
fn who_goes_on_from_the_one_before_a_broken_one_saves_in_its_place() {
    for step in [2, 3] {
        let fixture = Fixture::new();
        let mut lease = fixture.store().lease("test").expect("free");
        [1, 3].into_iter().for_each(|step| save(&mut lease, step).expect("saved"));
        let last = fs::metadata(fixture.file(3)).expect("there").len() - 1;
        flip_bit(&fixture.file(3), last);
        save(&mut lease, step).expect("the broken one is out of the way");
        assert_eq!(fixture.store().steps().expect("listed"), [1, step]);
        assert!(fixture.store().open(step).expect("intact").verify().is_empty());
    }
}

#[test]
fn row_40_a_second_job_is_refused_and_told_by_whom() {
    let fixture = Fixture::new();
    let lease = fixture.store().lease("job 17 on host a").expect("free");
    let refused = fixture.store().lease("job 18").expect_err("taken").to_string();
    let folder = fixture.folder.path().display();
    assert_eq!(
        refused,
        format!(
            "{folder} is being written to by job 17 on host a: a store has one writing job at a \
             time"
        )
    );
    drop(lease);
    fixture.store().lease("job 18").expect("free again");
}

#[test]
fn row_33_a_truncated_file_is_named_and_the_one_before_is_used() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    (1..=2).for_each(|step| save(&mut lease, step).expect("saved"));
    let file = OpenOptions::new().write(true).open(fixture.file(2)).expect("there");
    let full = file.metadata().expect("there").len();
    file.set_len(full - 1).expect("shortened");
    let Fallback { generation, broken } = fixture.store().newest().expect("listed");
    let generation = generation.expect("the one before");
    assert_eq!((generation.manifest().step, read(&generation, "w")), (1, elements(1, 30)));
    assert_eq!(broken.len(), 1);
    let told = broken[0].1.to_string();
    let path = fixture.file(2);
    assert_eq!(
        told,
        format!("{} has {} bytes, its manifest says {full}", path.display(), full - 1)
    );
}

/// Each value of 16 bits is an f32, too.
#[test]
fn elements_of_16_bits_are_written_as_f32() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    let draft = lease.begin(1).expect("new");
    let halves = [0.5, -6.1e-5].map(f16::from_f32);
    let brains = [1e30, f32::NAN].map(bf16::from_f32);
    let slice = |tensor, values| Slice { tensor, shape: &[2], offset: 0, values };
    let slices = [slice("a", Elements::F16(&halves)), slice("b", Elements::BF16(&brains))];
    draft.place().write(Writer { index: 0, of: 1 }, &slices).expect("written");
    draft.commit(Head::of_step(1), 1).expect("whole");
    let generation = fixture.store().latest().expect("read").expect("there");
    for (name, expected) in [("a", halves.map(f16::to_f32)), ("b", brains.map(bf16::to_f32))] {
        let mut found = [0.0; 2];
        generation.read(name, 0, &mut found).expect("read");
        assert_eq!(found.map(f32::to_bits), expected.map(f32::to_bits), "{name}");
    }
}

#[test]
fn row_34_what_is_in_the_making_is_never_seen_and_removed_by_the_next_writer() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    save(&mut lease, 1).expect("saved");
    let draft = lease.begin(2).expect("new");
    let values = elements(2, 30);
    let half = Slice { tensor: "w", shape: &[10, 3], offset: 0, values: values[..14].into() };
    draft.place().write(Writer { index: 0, of: 2 }, &[half]).expect("written");
    // The process ends here.
    assert_eq!(fixture.store().steps().expect("listed"), [1]);
    drop(lease);
    let count = || fs::read_dir(fixture.folder.path()).expect("there").count();
    let before = count();
    fixture.store().lease("test").expect("free");
    assert_eq!(count(), before - 1);
}

#[test]
fn row_35_a_flipped_bit_is_found_wherever_it_is() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    save(&mut lease, 1).expect("saved");
    let size = fs::metadata(fixture.file(1)).expect("there").len();
    for at in 0..size {
        flip_bit(&fixture.file(1), at);
        let generation = fixture.store().open(1).expect("the manifest is intact");
        assert_eq!(generation.verify().len(), 1, "byte {at}");
        let mut values = [0.0; 30];
        if at >= size - 14 * 4 {
            let told = generation.read("w", 13, &mut values[..2]).expect_err("corrupt").to_string();
            let expected = "elements 0 to 14 of tensor `w` are not those that were written: their \
                            hash differs";
            assert!(told.ends_with(expected), "{told}");
        }
        flip_bit(&fixture.file(1), at);
    }
    assert!(fixture.store().open(1).expect("intact").verify().is_empty());
}

#[test]
fn row_36_every_flipped_bit_of_a_manifest_is_found() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    save(&mut lease, 1).expect("saved");
    let path = fixture.path(1).join("manifest.json");
    let intact = fs::read(&path).expect("there");
    let expected = Manifest::decode(&path, &intact).expect("intact");
    for at in 0..intact.len() {
        for bit in 0..8 {
            let mut bytes = intact.clone();
            bytes[at] ^= 1 << bit;
            // The case of a hexadecimal digit does not matter.
            if let Ok(manifest) = Manifest::decode(&path, &bytes) {
                assert_eq!(manifest, expected, "bit {bit} of byte {at}");
                assert!(bytes.eq_ignore_ascii_case(&intact), "bit {bit} of byte {at}");
            }
        }
    }
    for len in 0..intact.len() {
        assert!(Manifest::decode(&path, &intact[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn what_no_reader_would_take_is_not_written() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    let draft = lease.begin(1).expect("new");
    let whole = Slice { tensor: "w", shape: &[2], offset: 0, values: Elements::F32(&[1.0, 2.0]) };
    draft.place().write(Writer { index: 0, of: 1 }, &[whole]).expect("written");
    let deep = (0..200).fold(Value::Null, |inside, _| Value::Array(vec![inside]));
    let refused = draft.commit(Head { user: deep, ..Head::of_step(1) }, 1).expect_err("too deep");
    assert!(refused.to_string().contains("recursion limit"), "{refused}");
    assert_eq!(fixture.store().steps().expect("listed"), [0_u64; 0]);
}

#[test]
fn many_readers_of_many_files_hold_few_of_them_open() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    save(&mut lease, 1).expect("saved");
    let open = || fs::read_dir("/proc/self/fd").expect("Linux").count();
    let before = open();
    let readers: Vec<Generation> =
        (0..500).map(|_| fixture.store().open(1).expect("intact")).collect();
    // Other tests of this process also have open files.
    assert!(open() < before + 100, "{} open files", open());
    assert!(readers.iter().all(|reader| read(reader, "w") == elements(1, 30)));
}

#[test]
fn a_manifest_of_another_step_in_a_directory_is_refused() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    save(&mut lease, 1).expect("saved");
    fs::rename(fixture.path(1), fixture.path(9)).expect("renamed");
    let told = fixture.store().open(9).expect_err("renamed").to_string();
    assert!(told.ends_with("it holds step 1, but its name says step 9"), "{told}");
}

#[test]
fn parts_that_leave_a_gap_or_differ_in_shape_are_no_generation() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    let values = elements(1, 30);
    for (offset, rows, expected) in [
        (15, 10, "tensor `w`: elements 14 to 15 are missing"),
        (13, 10, "tensor `w`: elements 13 to 14 are there twice"),
        (14, 11, "tensor `w`: one writer has shape [10, 3], another [11, 3]"),
    ] {
        let draft = lease.begin(1).expect("new");
        let first = Slice { tensor: "w", shape: &[10, 3], offset: 0, values: values[..14].into() };
        let second = Slice {
            tensor: "w",
            shape: &[rows, 3],
            offset,
            values: values[usize::try_from(offset).expect("small")..].into(),
        };
        for (index, slice) in [first, second].into_iter().enumerate() {
            draft.place().write(Writer { index, of: 2 }, &[slice]).expect("written");
        }
        let told = draft.commit(Head::of_step(1), 2).expect_err("refused").to_string();
        assert!(told.ends_with(expected), "{told}");
        assert_eq!(fixture.store().steps().expect("listed"), [0_u64; 0]);
        assert_eq!(fs::read_dir(fixture.folder.path()).expect("there").count(), 1, "the lease");
    }
}

#[test]
fn a_writer_that_never_wrote_is_missed() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    let draft = lease.begin(1).expect("new");
    let whole = Slice { tensor: "w", shape: &[2], offset: 0, values: Elements::F32(&[1.0, 2.0]) };
    draft.place().write(Writer { index: 0, of: 2 }, &[whole]).expect("written");
    let told = draft.commit(Head::of_step(1), 2).expect_err("refused").to_string();
    assert!(told.contains("r00001-of-00002.part.json"), "{told}");
}

#[test]
fn what_a_checkpoint_does_not_have_is_told() {
    let fixture = Fixture::new();
    let mut lease = fixture.store().lease("test").expect("free");
    save(&mut lease, 1).expect("saved");
    let generation = fixture.store().open(1).expect("intact");
    let mut values = [0.0; 4];
    let told = generation.read("v", 0, &mut values).expect_err("none").to_string();
    assert_eq!(told, "tensor `v`: the checkpoint has no tensor of that name");
    let told = generation.read("w", 27, &mut values).expect_err("too many").to_string();
    assert_eq!(told, "tensor `w`: elements 27..31 exceed its shape [10, 3]");
    let told = fixture.store().open(2).expect_err("none").to_string();
    assert!(told.ends_with("has no generation of step 2; it has [1]"), "{told}");
}
