//! `hsdp trace`: its explanation of the records that a world has left.

use std::fs;
use std::path::Path;
use std::sync::Barrier;

use hsdp_comm::{Channel, Error, FlightRecord, RankFailure, Tag, WorldOptions, explain, launch};

use crate::folder::{Folder, json};
use crate::program::hsdp;

/// Runs a world of three ranks. The last one panics while the others wait for it.
fn failed(folder: &Path) {
    let options = WorldOptions { flight_dir: Some(folder.to_owned()), ..WorldOptions::default() };
    let issued = Barrier::new(3);
    let ends = launch(3, options, |world| {
        let group = world.world_group(Channel::User);
        group.barrier(Tag::default()).and_then(|it| it.wait()).expect("all");
        if world.rank().index() < 2 {
            let pending = group.barrier(Tag::default()).expect("the world goes on");
            issued.wait();
            pending.wait().expect_err("rank 2 leaves");
        } else {
            issued.wait();
            panic!("batch 12 is bad");
        }
        Ok::<_, RankFailure>(())
    });
    assert!(ends[2].is_err());
}

#[test]
fn records_are_explained_as_the_library_does() {
    let folder = Folder::new();
    failed(folder.path());
    let files = [0, 1, 2].map(|rank| folder.at(&format!("rank-{rank}.json")));
    let records = files.each_ref().map(|file| {
        let text = fs::read_to_string(file).expect("a file");
        FlightRecord::from_json(&text).expect("a record")
    });
    let explanation = explain(&records);
    let expected = (Some(0), format!("{explanation}\n"), String::new());
    assert_eq!(hsdp(&["trace", &folder.name()]), expected);
    let [a, b, c] = &files;
    assert_eq!(hsdp(&["trace", c, a, b]), expected);
    assert!(expected.1.contains("batch 12 is bad"), "{}", expected.1);

    let said = json(&["trace", &folder.name()]);
    assert_eq!(said["text"], explanation.to_string());
    assert_eq!((&said["size"], &said["finding"]["kind"]), (&3.into(), &"missing".into()));
    assert_eq!(said["finding"]["absent"][0]["rank"], 2);
    assert_eq!(said["finding"]["operation"]["op"], "barrier");
}

#[test]
fn some_records_may_be_lost_and_a_world_may_have_been_well() {
    let folder = Folder::new();
    for record in met_in(0) {
        record.write_to(folder.path()).expect("written");
    }
    let (_, said, _) = hsdp(&["trace", &folder.name()]);
    assert!(said.starts_with("all ranks agree; 1 operation of 2 ranks compared"), "{said}");
    fs::remove_file(folder.at("rank-0.json")).expect("there");
    let (code, said, _) = hsdp(&["trace", &folder.name()]);
    assert_eq!(code, Some(0));
    assert!(said.contains("no record of rank 0"), "{said}");
}

/// Returns the records of a world of two ranks, which meet in this step.
fn met_in(step: u64) -> Vec<FlightRecord> {
    let records = launch(2, WorldOptions::default(), |world| -> Result<_, Error> {
        world.world_group(Channel::User).barrier(Tag::default().step(step))?.wait()?;
        Ok(world.flight_record())
    });
    records.into_iter().map(|record| record.expect("both")).collect()
}

/// The second attempt writes into the folder of the first, and its rank 1 is killed before it can.
#[test]
fn the_record_of_an_earlier_attempt_is_not_compared() {
    let folder = Folder::new();
    for record in met_in(3).iter().chain(met_in(9).first()) {
        record.write_to(folder.path()).expect("written");
    }
    let (code, said, _) = hsdp(&["trace", &folder.name()]);
    let expected = "all ranks agree; 0 operations of 2 ranks compared, and no rank waits in vain\n\
        no record of rank 1\n\
        ignored, as older or of another world: a record of rank 1\n\
        not all members of 1 operation could be compared\n";
    assert_eq!((code, &*said), (Some(0), expected));
    let told = folder.refused(&["check", &folder.name()]);
    let named = ": the record of rank 1 is of an earlier world: it was taken ";
    let end = " before the world of rank 0's record began";
    assert!(told.contains(named) && told.ends_with(end), "{told}");
}

#[test]
fn what_cannot_be_read_is_one_line() {
    let folder = Folder::new();
    fs::create_dir(folder.at("empty")).expect("made");
    folder.file("rank-0.json", "{\"version\": 7}");
    folder.file("broken.json", "{");
    for (name, expected) in [
        ("nowhere", "No such file or directory (os error 2)"),
        ("empty", "there is no rank-N.json in this folder"),
        ("rank-0.json", "a flight record of version 7; this library reads version 1"),
        ("broken.json", "not a flight record: EOF while parsing an object at line 1 column 1"),
    ] {
        let told = folder.refused(&["trace", &folder.at(name)]);
        assert_eq!(told, format!("hsdp: DIR/{name}: {expected}"));
    }
    let expected = "hsdp: the following required arguments were not provided: <DUMP>...";
    assert_eq!(folder.refused(&["trace"]), expected);
}
