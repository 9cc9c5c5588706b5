//! A network that is cut: packets are no longer delivered, and no connection ends.

use std::time::Duration;

use hsdp_control::{Bytes, ConnectionError, Loss, Rank, State};

use crate::exchange::{Exchange, lost, wait_for};
use crate::way::{Direction, Way};
use crate::world::{LONG, Ticks, World, each, quick};

const BOTH: [Direction; 2] = [Direction::ToCoordinator, Direction::ToMember];

#[test]
fn both_sides_of_a_cut_get_an_error_with_a_name() {
    let world = World::of(2, quick());
    let (way, members) = Way::in_world(&world);
    let [near, far] = &members[..] else { panic!("two members") };
    let open = each(vec![near, far], |member| Exchange::of(member).round(b"open"));
    assert!(open.iter().all(Result::is_ok), "{open:?}");

    way.cut(&BOTH);
    let started = Ticks::start();
    let status = wait_for(far, LONG, |status| status.ended.is_some());
    let said = status.ended.as_ref().map(ConnectionError::to_string);
    let expected =
        format!("rank 1 is cut off: nothing from the coordinator at {} for 1.05s", way.address);
    assert_eq!(said, Some(expected.clone()));
    let refused =
        far.pass(&[(Rank::new(0), 0)], Bytes::new()).expect_err("it is cut off").to_string();
    assert_eq!(refused, expected, "nobody goes on alone");
    let status = wait_for(near, LONG, |status| !lost(status).is_empty());
    let lost = State::Lost { loss: Loss::Silent, why: "silent for 1.05s".into() };
    assert_eq!(status.states[1], lost);
    assert!(Exchange::of(near).round(b"more").is_err());
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

/// The heartbeats of the member arrive, so only the member itself knows of the cut. It tells the
/// coordinator.
#[test]
fn a_cut_in_one_direction_is_told_in_the_other() {
    let world = World::of(2, quick());
    let (way, members) = Way::in_world(&world);
    way.cut(&[Direction::ToMember]);
    let started = Ticks::start();
    let status = wait_for(&members[0], LONG, |status| !lost(status).is_empty());
    let why = "it has heard nothing from the coordinator for 1.05s".into();
    assert_eq!(status.states[1], State::Lost { loss: Loss::Silent, why });
    assert!(matches!(members[1].status().ended, Some(ConnectionError::CutOff { .. })));
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

#[test]
fn a_call_into_a_cut_ends() {
    let world = World::of(1, quick());
    let way = Way::to(world.server.address());
    let member = way.join(&world, 0);
    way.cut(&BOTH);
    let started = Ticks::start();
    let error = Exchange::of(&member).round(b"").expect_err("nobody answers");
    assert!(matches!(member.status().ended, Some(ConnectionError::CutOff { .. })), "{error}");
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert!(member.leave().is_err());
}
