//! Rows 7, 8 and 9: ranks that are claimed twice, that were told another size, or that the world does not have.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::world::{Ended, Launch, Process, end};

/// A third of the deadline, and more than a busy machine takes.
const AT_ONCE: Duration = Duration::from_secs(10);

/// The output of an undisturbed world.
pub(crate) fn undisturbed(launch: &Launch) -> Vec<String> {
    let mut world = launch.elsewhere().world();
    world[0].tell();
    end(world).into_iter().map(Ended::well).collect()
}

pub(crate) fn row_7_a_second_claimant_is_refused_and_the_others_go_on() {
    let launch = Launch::new(3, "rounds");
    let expected = undisturbed(&launch);
    let first = launch.process(0);
    // Rank 2 has not come, so only a refused process can end.
    let (second, refused) = first_to_end([launch.process(1), launch.process(1)]);
    is_refused_for(&refused, second.id());
    let mut world = vec![first, second, launch.process(2)];
    let early = half_way(&mut world);
    // A job that has begun refuses another claimant, too.
    is_refused_for(&launch.process(2).end(), world[2].id());
    goes_on_as(world, early, expected);
}

fn half_way(world: &mut [Process]) -> Vec<String> {
    world.iter_mut().map(|process| process.wait_until_says("half")).collect()
}

/// Checks that it ends well, with the output of an undisturbed world.
fn goes_on_as(mut world: Vec<Process>, early: Vec<String>, expected: Vec<String>) {
    world[0].tell();
    for ((ended, early), expected) in end(world).into_iter().zip(early).zip(expected) {
        assert_eq!(early + &ended.well(), expected, "it was disturbed");
    }
}

fn is_refused_for(refused: &Ended, holder: u32) {
    let said = refused.badly();
    let (second, first) = said.split_once(" is refused: ").expect(said);
    let names = |member: &str, pid| {
        member.contains(&format!("(process {pid} on ")) && member.contains(", from 127.")
    };
    assert!(names(second, refused.pid) && names(first, holder), "{said}");
    assert!(first.ends_with(" has joined as that rank"), "{said}");
    assert!(refused.after < AT_ONCE, "after {:?}", refused.after);
}

/// The process that goes on, and the end of the other.
fn first_to_end([mut one, mut other]: [Process; 2]) -> (Process, Ended) {
    loop {
        if one.has_ended() {
            return (other, one.end());
        }
        if other.has_ended() {
            return (one, other.end());
        }
        std::thread::yield_now();
    }
}

pub(crate) fn row_7_rank_0_claimed_twice_has_no_port() {
    let launch = Launch::new(2, "rounds");
    let expected = undisturbed(&launch);
    let mut world = launch.world();
    let early = half_way(&mut world);
    let second = launch.process(0).end();
    let said = format!("the coordinator cannot listen at {}: Address", launch.address());
    assert!(second.badly().starts_with(&said), "{second:?}");
    assert!(second.after < AT_ONCE, "after {:?}", second.after);
    goes_on_as(world, early, expected);
}

pub(crate) fn row_8_another_world_size_is_told_to_all_ranks() {
    for (wrong, told) in [(1, 4), (0, 2)] {
        let started = Instant::now();
        let launch = Launch::new(3, "rounds");
        let size = |rank| if rank == wrong { told } else { 3 };
        let process = |rank| launch.set("WORLD_SIZE", size(rank)).process(rank);
        let mut world = vec![process(0), process(1)];
        while !world[1].has_ended() {
            std::thread::yield_now();
        }
        // A rank that starts later gets the same error.
        world.push(process(2));
        let ended = end(world);
        let took = started.elapsed();
        let said = ended[1].badly();
        let expected = format!("the world size differs: rank 1 (process {} on ", ended[1].pid);
        let sides = format!(" has {}, the coordinator has {}", size(1), size(0));
        assert!(said.starts_with(&expected) && said.ends_with(&sides), "{said}");
        for other in &ended {
            assert_eq!((other.badly(), other.said.as_str()), (said, ""));
        }
        assert!(took < AT_ONCE, "{took:?}");
    }
}

pub(crate) fn row_9_a_rank_that_cannot_be_ends_before_any_socket() {
    let cases = [
        (("RANK", "4"), "RANK=4: ranks of a world of 4 are numbered from 0 to 3"),
        (("RANK", "-1"), "RANK=-1: not a number: invalid digit found in string"),
        (
            ("LOCAL_RANK", "2"),
            "LOCAL_RANK=2: it must not exceed RANK=1, which counts over all hosts",
        ),
        (("WORLD_SIZE", "0"), "WORLD_SIZE=0: a world of 0 ranks: there must be 1 to 4096"),
        (("WORLD_SIZE", "1"), "RANK=1: ranks of a world of 1 are numbered from 0 to 0"),
    ];
    let launch = Launch::new(4, "rounds");
    let listener = TcpListener::bind(launch.address()).expect("it is free");
    listener.set_nonblocking(true).expect("a listener");
    for ((name, value), expected) in cases {
        let ended = launch.set(name, value).process(1).end();
        assert_eq!((ended.badly(), ended.said.as_str()), (expected, ""));
        let nobody = listener.accept().expect_err("nobody has come");
        assert_eq!(nobody.kind(), ErrorKind::WouldBlock);
    }
}
