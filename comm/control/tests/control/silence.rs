//! Silent members: suspected, alive again, or lost.

use std::time::{Duration, Instant};

use hsdp_control::{ControlError, Loss, Rank, State};

use crate::exchange::{Exchange, wait_for};
use crate::way::{Direction, Way};
use crate::world::{LONG, World, quick};

#[test]
fn a_silent_member_is_suspected_by_name_and_comes_back() {
    let world = World::of(3, quick());
    let (way, members) = Way::in_world(&world);
    way.cut(&[Direction::ToCoordinator]);
    let started = Instant::now();
    for member in &members {
        let status = wait_for(member, LONG, |status| status.states().contains(&State::Suspect));
        assert_eq!(status.states(), [State::Alive, State::Alive, State::Suspect]);
        assert!(status.ended().is_none());
    }
    let took = started.elapsed();
    assert!(took > Duration::from_millis(200) && took < Duration::from_millis(900), "{took:?}");
    way.mend();
    for member in &members {
        let status = wait_for(member, LONG, |status| !status.states().contains(&State::Suspect));
        assert_eq!(status.states(), [State::Alive, State::Alive, State::Alive]);
    }
}

#[test]
fn who_stays_silent_is_lost_and_is_told_so() {
    let world = World::of(2, quick());
    let (way, members) = Way::in_world(&world);
    way.cut(&[Direction::ToCoordinator]);
    let started = Instant::now();
    let status = wait_for(&members[0], LONG, |status| !status.lost().is_empty());
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    let lost = State::Lost { loss: Loss::Silent, why: "silent for 1.05s".into() };
    assert_eq!(status.states()[1], lost);
    let status = wait_for(&members[1], LONG, |status| status.ended().is_some());
    let address = way.address;
    let expected =
        format!("the coordinator at {address} has declared rank 1 lost: silent for 1.05s");
    assert_eq!(status.ended().map(ControlError::to_string), Some(expected.clone()));
    let refused = members[1].pass(Rank::new(0), Vec::new()).expect_err("it is a member no more");
    assert_eq!(refused.to_string(), expected);
    let refused = Exchange::of(&members[0]).round(b"").expect_err("one is lost");
    assert_eq!(refused, "lost [1], finished []");
}
