//! Row 12: the process of the coordinator dies, or is stopped.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::coming::undisturbed;
use crate::world::{Ended, Launch, Process, all_say, end};

pub(crate) fn row_12_a_killed_coordinator_is_lost_to_all() {
    let launch = Launch::new(3, "watch");
    let mut world = launch.world();
    all_say(&mut world, "joined");
    let killed = Instant::now();
    world[0].signal(Signal::KILL);
    for rank in [1, 2] {
        let address = launch.address();
        let lost = format!(
            "ended: rank {rank} has lost the coordinator at {address}: its connection ended"
        );
        world[rank].wait_until_says(&lost);
    }
    let took = killed.elapsed();
    // Half of the time for which it would have to be silent.
    assert!(took < Duration::from_secs(10), "{took:?} until it was known");
}

/// A world in the middle of its rounds, with rank 0 waiting; the output of its ranks, and the states that they must keep.
fn half_way(launch: &Launch) -> (Vec<Process>, Vec<String>) {
    let expected = undisturbed(launch);
    let mut world = launch.world();
    let kept = world.iter_mut().zip(&expected).map(|(process, expected)| {
        let said = process.wait_until_says("half");
        assert!(expected.starts_with(&said), "{said} instead of {expected}");
        let last = said.lines().rev().nth(1).expect("there were rounds");
        format!("kept {last}\n")
    });
    let kept = kept.collect();
    (world, kept)
}

fn is_told(ended: &Ended, kept: &str, expected: &str) {
    assert_eq!((ended.badly(), ended.said.as_str()), (expected, kept));
}

pub(crate) fn row_12_members_of_a_killed_coordinator_keep_what_they_have() {
    let launch = Launch::new(3, "rounds");
    let (mut world, kept) = half_way(&launch);
    let killed = Instant::now();
    drop(world.remove(0));
    for (rank, ended) in (1..).zip(end(world)) {
        let address = launch.address();
        let expected =
            format!("rank {rank} has lost the coordinator at {address}: its connection ended");
        is_told(&ended, &kept[rank], &expected);
    }
    // A round of messages waits for 30 s.
    let took = killed.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
}

pub(crate) fn row_12_members_of_a_stopped_coordinator_are_cut_off() {
    let launch = Launch::new(3, "rounds").set("HSDP_TEST_LOST", 10);
    let (mut world, kept) = half_way(&launch);
    let stopped = Instant::now();
    let mut first = world.remove(0);
    first.signal(Signal::STOP);
    for (rank, ended) in (1..).zip(end(world)) {
        let address = launch.address();
        let expected =
            format!("rank {rank} is cut off: nothing from the coordinator at {address} for 2.1s");
        is_told(&ended, &kept[rank], &expected);
    }
    let took = stopped.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    // When the coordinator resumes, its rank does not continue alone.
    first.signal(Signal::CONT);
    first.tell();
    let ended = first.end();
    let said = ended.badly();
    // The loss of one of the two may be known before that of the other.
    let needs = |lost| format!("lost {lost}, finished []");
    assert!(["[1]", "[2]", "[1, 2]"].map(needs).contains(&said.to_owned()), "{said}");
    assert_eq!(ended.said, kept[0]);
}
