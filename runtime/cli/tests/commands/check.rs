//! `hsdp check`: verdicts, exit codes, and worlds that were cut off.

use std::fs;
use std::sync::Barrier;
use std::time::Duration;

use hsdp_comm::{Channel, RankFailure, Tag, World, WorldOptions, launch};

use crate::folder::Folder;
use crate::program::hsdp;

/// Returns the schedules of two ranks with these actions, on the communicator `world`.
fn schedules(of_ranks: [&str; 2]) -> String {
    let [zero, one] = of_ranks;
    format!(
        r#"{{"communicators": {{"world": [0, 1]}}, "kernels": 0, "schedules": [[{zero}], [{one}]]}}"#
    )
}

const GATHER: &str =
    r#"{"comm": "world", "op": "all_gather", "dtype": "f32", "count": 1000, "stream": 0}"#;

/// A folder with `ok.json`, `mismatch.json`, `deadlock.json` and `bad.json`.
fn folder() -> Folder {
    let folder = Folder::new();
    let waited = format!(r#"{GATHER}, {{"wait": 0}}"#);
    for (name, text) in [
        ("ok.json", schedules([&waited, GATHER])),
        ("mismatch.json", schedules([&waited, &GATHER.replace("1000", "999")])),
        ("deadlock.json", schedules([&waited, ""])),
        ("bad.json", schedules([GATHER, r#"{"wait": 0}"#])),
    ] {
        folder.file(name, &text);
    }
    folder
}

/// Returns the verdict of one file, with its exit code.
fn verdict(file: &str) -> (Option<i32>, String) {
    let (code, said, told) = hsdp(&["check", file]);
    assert_eq!(told, "");
    let named = format!("{file}: ");
    (code, said.strip_prefix(&named).unwrap_or_else(|| panic!("{said}")).to_owned())
}

const MISMATCH: &str = "mismatch: operation #0 of world: rank 0 issues all_gather f32 1000, rank 1 issues all_gather f32 999\n";
const DEADLOCK: &str = "deadlock: rank 0 is stuck: rank 0 waits for all_gather #0 of world, which rank 1 never issues\n";

#[test]
fn each_file_has_a_line_and_the_exit_code_tells_whether_all_are_good() {
    let folder = folder();
    let names = ["ok.json", "mismatch.json", "deadlock.json"];
    let [ok, mismatch, deadlock] = names.map(|name| folder.at(name));
    assert_eq!(verdict(&ok), (Some(0), "ok\n".to_owned()));
    assert_eq!(verdict(&mismatch), (Some(1), MISMATCH.to_owned()));
    assert_eq!(verdict(&deadlock), (Some(1), DEADLOCK.to_owned()));
    let lines = format!("{mismatch}: {MISMATCH}{deadlock}: {DEADLOCK}{ok}: ok\n");
    assert_eq!(hsdp(&["check", &mismatch, &deadlock, &ok]), (Some(1), lines, String::new()));
    let lines = format!("{ok}: ok\n{ok}: ok\n");
    assert_eq!(hsdp(&["check", &ok, &ok]), (Some(0), lines, String::new()));
}

#[test]
fn what_cannot_be_judged_is_one_line_after_those_before() {
    let folder = folder();
    let [ok, deadlock, bad] = ["ok.json", "deadlock.json", "bad.json"].map(|name| folder.at(name));
    let problem = "schedules[1][0]: it waits for action 0, which is the wait itself";
    let told = format!("hsdp: {bad}: {problem}\n");
    let lines = format!("{ok}: ok\n{deadlock}: {DEADLOCK}");
    assert_eq!(hsdp(&["check", &ok, &deadlock, &bad, &ok]), (Some(2), lines, told));
    let expected = "hsdp: the following required arguments were not provided: <FILE>...";
    assert_eq!(folder.refused(&["check"]), expected);
    let told = folder.refused(&["check", &folder.at("nowhere.json")]);
    assert_eq!(told, "hsdp: DIR/nowhere.json: No such file or directory (os error 2)");
}

#[test]
fn the_name_of_a_file_breaks_no_line() {
    let folder = folder();
    let [from, to] = ["ok.json", "o\nk.json"].map(|name| folder.at(name));
    fs::rename(from, &to).expect("renamed");
    let (code, said, _) = hsdp(&["check", &to]);
    assert_eq!(code, Some(0));
    assert!(said.ends_with("/o\\nk.json: ok\n"), "{said}");
}

/// Returns the records of a world of three ranks that ends early.
fn cut_off(work: impl Fn(&World) + Send + Sync) -> Folder {
    let folder = Folder::new();
    let flight_dir = Some(folder.path().to_owned());
    let deadline = Duration::from_secs(1);
    let options = WorldOptions { flight_dir, deadline, ..WorldOptions::default() };
    launch(3, options, |world| {
        work(&world);
        Ok::<_, RankFailure>(())
    });
    folder
}

fn meet(world: &World, channel: Channel) -> Result<(), hsdp_comm::Error> {
    world.world_group(channel).barrier(Tag::default()).and_then(|it| it.wait())
}

#[test]
fn ranks_that_waited_for_one_that_computed() {
    let all_have_failed = Barrier::new(3);
    let folder = cut_off(|world| {
        meet(world, Channel::User).expect("all");
        if world.rank().index() < 2 {
            meet(world, Channel::User).expect_err("rank 2 does not come in time");
        }
        all_have_failed.wait();
    });
    let expected = "deadlock: ranks 0-1 are stuck: ranks 0-1 wait for barrier #1 of channel user of ranks 0-2, \
        which rank 2 had not issued when its record ends\n";
    assert_eq!(verdict(&folder.name()), (Some(1), expected.to_owned()));
    fs::remove_file(folder.at("rank-2.json")).expect("there");
    let (code, said) = verdict(&folder.name());
    assert_eq!(code, Some(1));
    let end = "which rank 2 may not have issued: there is no record of it\n";
    assert!(said.ends_with(end), "{said}");
}

#[test]
fn ranks_that_waited_for_each_other() {
    let all_are_here = Barrier::new(3);
    let folder = cut_off(|world| {
        all_are_here.wait();
        let channel = if world.rank().index() == 0 { Channel::User } else { Channel::Gather };
        meet(world, channel).expect_err("the others wait elsewhere");
    });
    let expected = "deadlock: ranks 0-2 are stuck: rank 0 waits for barrier #0 of channel user of ranks 0-2, \
        which ranks 1-2 have not issued: they wait for barrier #0 of channel gather of ranks 0-2, which rank 0 has not issued\n";
    assert_eq!(verdict(&folder.name()), (Some(1), expected.to_owned()));
}

#[test]
fn records_of_a_world_that_was_well_and_records_alone() {
    let folder = Folder::new();
    let records = launch(2, WorldOptions::default(), |world| {
        meet(&world, Channel::User)?;
        Ok::<_, hsdp_comm::Error>(world.flight_record())
    });
    for record in records {
        record.expect("both").write_to(folder.path()).expect("written");
    }
    assert_eq!(verdict(&folder.name()), (Some(0), "ok\n".to_owned()));
    let told = folder.refused(&["check", &folder.at("rank-0.json")]);
    let advice = "flight records are checked together, by the name of their folder";
    assert!(told.ends_with(advice), "{told}");
}
