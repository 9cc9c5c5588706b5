//! Silent members: suspected, alive again, or lost.

use std::time::{Duration, Instant};

use hsdp_control::{ControlError, Loss, Rank, State};

use crate::world::{LONG, World, quick};

#[test]
fn a_silent_member_is_suspected_by_name_and_comes_back() {
    let world = World::of(3, quick());
    let members = world.join();
    members[1].fall_silent();
    let started = Instant::now();
    for member in &members {
        let status = member.wait_for(LONG, |status| !status.suspects().is_empty());
        assert_eq!(status.suspects(), [Rank::new(1)]);
        assert!(status.ended().is_none());
    }
    let took = started.elapsed();
    assert!(took > Duration::from_millis(200) && took < Duration::from_millis(900), "{took:?}");
    members[1].speak_again();
    for member in &members {
        let status = member.wait_for(LONG, |status| status.suspects().is_empty());
        assert_eq!(status.states(), [State::Alive, State::Alive, State::Alive]);
    }
}

#[test]
fn who_stays_silent_is_lost_and_is_told_so() {
    let world = World::of(2, quick());
    let members = world.join();
    members[1].fall_silent();
    let status = members[0].wait_for(LONG, |status| !status.lost().is_empty());
    let lost = State::Lost { loss: Loss::Silent, why: "silent for 1.05s".into() };
    assert_eq!(status.state(Rank::new(1)), Some(&lost));
    let status = members[1].wait_for(LONG, |status| status.ended().is_some());
    let address = world.server.address();
    let expected =
        format!("the coordinator at {address} has declared rank 1 lost: silent for 1.05s");
    assert_eq!(status.ended().map(ControlError::to_string), Some(expected.clone()));
    let refused = members[1].exchange("more", b"").expect_err("it is a member no more");
    assert_eq!(refused.to_string(), expected);
    let refused = members[0].exchange("more", b"").expect_err("one is lost").to_string();
    assert_eq!(refused, "`more` needs all ranks: lost [1], finished []");
}

#[test]
fn silence_in_a_round_does_not_make_it_wait_for_its_deadline() {
    let mut deadlines = quick();
    deadlines.round = LONG;
    let world = World::of(2, deadlines);
    let members = world.join();
    members[1].fall_silent();
    let started = Instant::now();
    let refused = members[0].exchange("k", b"").expect_err("one is lost").to_string();
    assert_eq!(refused, "`k` needs all ranks: lost [1], finished []");
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}
