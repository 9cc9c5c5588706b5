//! The ends of a member and of a coordinator, and the errors that the others get.

use std::time::Duration;

use hsdp_control::{ConnectionError, Deadlines, Loss, Options, Rank, Server, State};

use crate::address::free_address;
use crate::exchange::{Exchange, finished, lost, wait_for};
use crate::world::{LONG, Ticks, World, each, options, quick};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn all_who_leave_at_once_are_answered_while_they_beat() {
    let beat = Duration::from_millis(1);
    // An answer that is lost does not come later either.
    let deadlines = Deadlines { beat, lost: 20_000, handshake: LONG, ..quick() };
    for _ in 0..4 {
        let world = World::of(32, deadlines);
        each(world.join(), |member| member.leave().expect("heard"));
        world.server.finish(LONG).expect("all have left");
    }
}

#[test]
fn finished_is_told_from_lost() {
    let world = World::of(3, quick());
    let mut members = world.join();
    let started = Ticks::start();
    drop(members.pop());
    members.pop().expect("rank 1").leave().expect("heard");
    let done = |status: &hsdp_control::Status| {
        status.states.iter().filter(|state| **state == State::Alive).count() == 1
    };
    let status = wait_for(&members[0], LONG, done);
    assert_eq!((finished(&status), lost(&status)), (vec![Rank::new(1)], vec![Rank::new(2)]));
    let why = State::Lost { loss: Loss::Ended, why: "its connection ended before it left".into() };
    assert_eq!(status.states[2], why);
    assert!(started.elapsed() < SECOND, "{:?}", started.elapsed());
    let refused = Exchange::of(&members[0]).round(b"").expect_err("nobody is there");
    assert_eq!(refused, "lost [2], finished [1]");
}

#[test]
fn who_loses_the_coordinator_is_told_so_at_the_next_call() {
    let world = World::of(3, quick());
    let members = world.join();
    let address = world.server.address();
    let started = Ticks::start();
    drop(world);
    for (rank, member) in members.into_iter().enumerate() {
        let lost = Exchange::of(&member).round(b"").expect_err("there is no coordinator");
        let expected = format!("rank {rank} has lost the coordinator at {address}: ");
        assert!(lost.starts_with(&expected), "{lost}");
        let status = member.status();
        assert!(
            matches!(status.ended, Some(ConnectionError::CoordinatorLost { .. })),
            "{status:?}"
        );
        assert!(member.leave().is_err());
    }
    assert!(started.elapsed() < SECOND, "{:?}", started.elapsed());
}

#[test]
fn who_waits_for_messages_is_told_that_the_coordinator_is_lost() {
    let world = World::of(2, quick());
    let members = world.join();
    let server = world.server;
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| Exchange::of(&members[0]).round(b""));
        drop(server);
        let lost = waits.join().expect("no panic").expect_err("it is gone");
        let status = members[0].status();
        assert!(matches!(status.ended, Some(ConnectionError::CoordinatorLost { .. })), "{lost}");
    });
}

#[test]
fn a_coordinator_that_ends_says_who_is_still_there() {
    let world = World::of(2, quick());
    let mut members = world.join();
    members.pop().expect("rank 1").leave().expect("heard");
    let left = world.server.finish(Duration::from_millis(50)).expect_err("rank 0 is there");
    assert_eq!(left.to_string(), "after 50ms ranks [0] have neither left nor been lost");
}

#[test]
fn a_port_is_free_again_when_a_coordinator_has_ended() {
    let address = free_address();
    for _ in 0..2 {
        let server = Server::start(Options { address, ..options(1) }).expect("it is free");
        assert_eq!(server.address(), address);
    }
}
