//! The files that a launch leaves when its world ends early.

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use hsdp_comm::{FlightRecord, FlightState, World, WorldOptions, explain};
use hsdp_sharding::Rank;

use super::{gather, last, until};
use crate::common::outcomes;

fn options(folder: &Path) -> WorldOptions {
    WorldOptions { flight_dir: Some(folder.to_owned()), ..WorldOptions::default() }
}

fn files(folder: &Path) -> Vec<String> {
    let files = fs::read_dir(folder).expect("the folder");
    let mut names: Vec<_> = files
        .map(|file| file.expect("an entry").file_name().into_string().expect("a name"))
        .collect();
    names.sort();
    names
}

fn read(folder: &Path, rank: usize) -> FlightRecord {
    let text = fs::read_to_string(folder.join(format!("rank-{rank}.json"))).expect("a file");
    FlightRecord::from_json(&text).expect("a record")
}

#[test]
fn each_rank_leaves_its_record_when_one_panics() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path().join("of/this/run");
    let others = Mutex::new(Vec::new());
    let ends = outcomes(3, options(&folder), |world| {
        gather(&world, 1).expect("all");
        if world.rank().index() == 1 {
            let waits = |world: &World| last(&world.flight_record()).is_waited_for();
            let wait =
                || others.lock().expect("not poisoned").iter().filter(|it| waits(it)).count();
            until("the others", || wait() == 2);
            panic!("batch 12 is bad");
        }
        others.lock().expect("not poisoned").push(world.clone());
        gather(&world, 2).expect_err("rank 1 panics");
    });
    others.lock().expect("not poisoned").clear();
    assert!(ends[1].is_err());
    assert_eq!(files(&folder), ["rank-0.json", "rank-1.json", "rank-2.json"]);
    let records = [0, 1, 2].map(|rank| read(&folder, rank));
    for (rank, record) in records.iter().enumerate() {
        assert_eq!(record.rank, Rank::new(rank));
        let end = record.end.as_deref().expect("the world ended");
        assert!(end.contains("rank 1") && end.ends_with("it panicked: batch 12 is bad"), "{end}");
    }
    assert_eq!(last(&records[1]).state, FlightState::Complete);
    let text = explain(&records).to_string();
    let expected = [
        "step 7, microbatch 0: ranks 0, 2 wait in all_gather of unit 2 (sequence 1), for ",
        "; rank 1 has not issued it: its last operation was all_gather of unit 1 (sequence 0), ",
        ": it panicked: batch 12 is bad\n",
    ];
    for part in expected {
        assert!(text.contains(part), "`{part}` is missing in:\n{text}");
    }
}

#[test]
fn a_rank_that_was_gone_before_the_end_leaves_its_record_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let ends = outcomes(2, options(folder.path()), |world| {
        gather(&world, 1).expect("both");
        if world.rank().index() == 0 {
            return None;
        }
        // Rank 0 may be gone for long.
        super::pass(std::time::Duration::from_millis(50));
        gather(&world, 2).err()
    });
    assert!(matches!(&ends[1], Ok(Some(end)) if end.to_string().contains("it left")), "{ends:?}");
    assert_eq!(files(folder.path()), ["rank-0.json", "rank-1.json"]);
    assert!(read(folder.path(), 0).end.is_some());
}

#[test]
fn a_world_that_ends_well_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    outcomes(2, options(folder.path()), |world| gather(&world, 1).expect("both"));
    assert_eq!(files(folder.path()), <[&str; 0]>::default());
}

#[test]
fn what_cannot_be_written_hides_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("a file");
    fs::write(&file, "in the way").expect("written");
    let ends = outcomes(2, options(&file), |world| {
        if world.rank().index() == 0 {
            world.abort("enough");
        }
        until("the end", || world.end().is_some());
        world.end().map(|end| end.to_string())
    });
    for end in ends {
        assert!(end.expect("no panic").expect("an end").ends_with("enough"));
    }
    assert_eq!(files(folder.path()), ["a file"]);
}

#[test]
fn a_record_of_an_earlier_world_is_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    for units in [3, 1] {
        outcomes(1, options(folder.path()), |world| {
            (0..units).for_each(|unit| gather(&world, unit).expect("alone"));
            world.abort("enough");
        });
        assert_eq!(read(folder.path(), 0).entries.len(), units);
    }
    assert_eq!(files(folder.path()), ["rank-0.json"]);
}
