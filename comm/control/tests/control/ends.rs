//! The ends of a member, a job and a coordinator, and the errors that the others get.

use std::time::{Duration, Instant};

use hsdp_control::{ControlError, Deadlines, Loss, Rank, Server, ServerOptions, State};

use crate::world::{LONG, World, each, job, quick, secret, terms};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn an_abort_reaches_all_within_a_second() {
    let world = World::of(4, quick());
    let members = world.join();
    let started = Instant::now();
    members[2].abort("loss is not finite");
    members[1].abort("too late to count");
    for member in &members {
        let status = member.wait_for(LONG, |status| status.ended().is_some());
        let said = status.ended().map(ControlError::to_string);
        assert_eq!(said.as_deref(), Some("rank 2 ended the job: loss is not finite"));
        let refused = member.exchange("more", b"").expect_err("it is over").to_string();
        assert_eq!(refused, "rank 2 ended the job: loss is not finite");
    }
    assert!(started.elapsed() < SECOND, "{:?}", started.elapsed());
    each(members, |member| member.leave().expect("a goodbye is heard after an abort, too"));
    world.server.finish(LONG).expect("all have left");
}

#[test]
fn an_abort_ends_a_round_that_waits() {
    let world = World::of(2, quick());
    let members = world.join();
    let calls = each(vec![0, 1], |rank| match rank {
        0 => members[0].exchange("waits", b"").map(drop),
        _ => {
            members[1].abort("no memory");
            Ok(())
        }
    });
    let said = calls[0].as_ref().expect_err("aborted").to_string();
    assert_eq!(said, "rank 1 ended the job: no memory");
}

#[test]
fn an_abort_is_heard_though_its_process_is_gone_then() {
    for _ in 0..20 {
        let world = World::of(2, quick());
        let mut members = world.join();
        let gone = members.pop().expect("rank 1");
        gone.abort("panicked");
        drop(gone);
        let status = members[0].wait_for(LONG, |status| status.ended().is_some());
        let said = status.ended().map(ControlError::to_string);
        assert_eq!(said.as_deref(), Some("rank 1 ended the job: panicked"));
    }
}

#[test]
fn all_who_leave_at_once_are_answered_while_they_beat() {
    let deadlines = Deadlines { beat: Duration::from_millis(1), lost: 20_000, ..quick() };
    for _ in 0..4 {
        let world = World::of(32, deadlines);
        each(world.join(), |member| member.leave().expect("heard"));
        world.server.finish(LONG).expect("all have left");
    }
}

#[test]
fn a_long_reason_is_cut() {
    let world = World::of(1, quick());
    let members = world.join();
    members[0].abort(&"é".repeat(1000));
    let status = members[0].status();
    let Some(ControlError::Aborted { reason, .. }) = status.ended() else { panic!("{status:?}") };
    assert_eq!(*reason, "é".repeat(128));
}

#[test]
fn finished_is_told_from_lost() {
    let world = World::of(3, quick());
    let mut members = world.join();
    let started = Instant::now();
    drop(members.pop());
    members.pop().expect("rank 1").leave().expect("heard");
    let done = |status: &hsdp_control::Status| {
        status.states().iter().filter(|state| **state == State::Alive).count() == 1
    };
    let status = members[0].wait_for(LONG, done);
    assert_eq!((status.finished(), status.lost()), (vec![Rank::new(1)], vec![Rank::new(2)]));
    let why = State::Lost { loss: Loss::Ended, why: "its connection ended before it left".into() };
    assert_eq!(status.state(Rank::new(2)), Some(&why));
    assert!(started.elapsed() < SECOND, "{:?}", started.elapsed());
    let refused = members[0].exchange("more", b"").expect_err("nobody is there").to_string();
    assert_eq!(refused, "`more` needs all ranks: lost [2], finished [1]");
}

#[test]
fn who_loses_the_coordinator_is_told_so_at_the_next_call() {
    let world = World::of(3, quick());
    let members = world.join();
    let address = world.server.address();
    let started = Instant::now();
    drop(world);
    for (rank, member) in members.into_iter().enumerate() {
        let lost = member.exchange("more", b"").expect_err("there is no coordinator").to_string();
        let expected = format!("rank {rank} has lost the coordinator at {address}: ");
        assert!(lost.starts_with(&expected), "{lost}");
        let status = member.status();
        assert!(matches!(status.ended(), Some(ControlError::CoordinatorLost { .. })), "{status:?}");
        assert!(member.leave().is_err());
    }
    assert!(started.elapsed() < SECOND, "{:?}", started.elapsed());
}

#[test]
fn who_waits_in_a_round_is_told_that_the_coordinator_is_lost() {
    let world = World::of(2, quick());
    let members = world.join();
    let server = world.server;
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| members[0].exchange("waits", b""));
        drop(server);
        let lost = waits.join().expect("no panic").expect_err("it is gone");
        assert!(matches!(lost, ControlError::CoordinatorLost { .. }), "{lost}");
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
    let server = World::of(1, quick()).server;
    let address = server.address();
    drop(server);
    let options = ServerOptions::new(job(), secret(), terms(1));
    let again = options.bind(hsdp_control::Bind::Address(address));
    assert_eq!(Server::start(again).expect("it is free").address(), address);
}
