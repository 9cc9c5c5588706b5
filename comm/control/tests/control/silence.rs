//! Silent members: they come back, or are lost.

use std::time::Duration;

use hsdp_control::{Bytes, ConnectionError, Loss, Rank, State};

use crate::exchange::{Exchange, in_one_world, lost, pause, wait_for};
use crate::way::{Direction, Way};
use crate::world::{LONG, Ticks, World, quick};

#[test]
fn a_silent_member_that_comes_back_in_time_is_not_lost() {
    let world = World::of(3, quick());
    let (way, members) = Way::in_world(&world);
    way.cut(&[Direction::ToCoordinator]);
    pause(Duration::from_millis(600));
    way.mend();
    for member in &members {
        // Longer than the silence after which a member is lost.
        let status = wait_for(member, Duration::from_millis(1100), |status| {
            status.ended.is_some() || status.states != [State::Alive, State::Alive, State::Alive]
        });
        assert_eq!(status.states, [State::Alive, State::Alive, State::Alive]);
        assert_eq!(status.ended, None);
    }
    in_one_world(&members[0], &members[2]);
}

#[test]
fn who_stays_silent_is_lost_and_is_told_so() {
    let world = World::of(2, quick());
    let (way, members) = Way::in_world(&world);
    way.cut(&[Direction::ToCoordinator]);
    let started = Ticks::start();
    let status = wait_for(&members[0], LONG, |status| !lost(status).is_empty());
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    let lost = State::Lost { loss: Loss::Silent, why: "silent for 1.05s".into() };
    assert_eq!(status.states[1], lost);
    let status = wait_for(&members[1], LONG, |status| status.ended.is_some());
    let address = way.address;
    let expected =
        format!("the coordinator at {address} has declared rank 1 lost: silent for 1.05s");
    assert_eq!(status.ended.as_ref().map(ConnectionError::to_string), Some(expected.clone()));
    let refused =
        members[1].pass(&[(Rank::new(0), 0)], Bytes::new()).expect_err("it is a member no more");
    assert_eq!(refused.to_string(), expected);
    let refused = Exchange::of(&members[0]).round(b"").expect_err("one is lost");
    assert_eq!(refused, "lost [1], finished []");
}
