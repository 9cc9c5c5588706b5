//! A network that is cut: packets are no longer delivered, and no connection ends.

use std::time::Duration;

use hsdp_control::{Client, ClientOptions, ControlError, Loss, Rank, State};

use crate::way::{Direction, Way};
use crate::world::{LONG, Ticks, World, each, job, quick, secret, terms};

const BOTH: [Direction; 2] = [Direction::ToCoordinator, Direction::ToMember];

#[test]
fn both_sides_of_a_cut_get_an_error_with_a_name() {
    let world = World::of(2, quick());
    let (way, members) = Way::in_world(&world);
    let [near, far] = &members[..] else { panic!("two members") };
    let open = each(vec![near, far], |member| member.exchange("open", b""));
    assert!(open.iter().all(Result::is_ok), "{open:?}");

    way.cut(&BOTH);
    let started = Ticks::start();
    let status = far.wait_for(LONG, |status| status.ended().is_some());
    let said = status.ended().map(ControlError::to_string);
    let expected =
        format!("rank 1 is cut off: nothing from the coordinator at {} for 1.05s", way.address);
    assert_eq!(said, Some(expected.clone()));
    let refused = far.exchange("more", b"").expect_err("it is cut off").to_string();
    assert_eq!(refused, expected, "nobody goes on alone");
    let status = near.wait_for(LONG, |status| !status.lost().is_empty());
    let lost = State::Lost { loss: Loss::Silent, why: "silent for 1.05s".into() };
    assert_eq!(status.state(Rank::new(1)), Some(&lost));
    assert!(near.exchange("more", b"").is_err());
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

/// The heartbeats of the member arrive, so only the member itself knows of the cut. It tells the coordinator.
#[test]
fn a_cut_in_one_direction_is_told_in_the_other() {
    let world = World::of(2, quick());
    let (way, members) = Way::in_world(&world);
    way.cut(&[Direction::ToMember]);
    let started = Ticks::start();
    let status = members[0].wait_for(LONG, |status| !status.lost().is_empty());
    let why = "it has heard nothing from the coordinator for 1.05s".into();
    assert_eq!(status.state(Rank::new(1)), Some(&State::Lost { loss: Loss::Silent, why }));
    assert!(matches!(members[1].status().ended(), Some(ControlError::CutOff { .. })));
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

#[test]
fn a_call_into_a_cut_ends() {
    let world = World::of(1, quick());
    let way = Way::to(world.server.address());
    let options = ClientOptions::new(way.address, Rank::new(0), job(), secret(), terms(1));
    let member = Client::join(options.deadlines(quick())).expect("a member");
    way.cut(&BOTH);
    let started = Ticks::start();
    let error = member.exchange("k", b"").expect_err("nobody answers");
    assert!(matches!(error, ControlError::CutOff { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert!(member.leave().is_err());
}
