//! A network that changes a message: the members learn whose message failed authentication.

use std::time::{Duration, Instant};

use hsdp_control::{ConnectionError, Loss, Membership, Rank, State};

use crate::exchange::{lost, wait_for};
use crate::way::{Direction, Spot, Way};
use crate::world::{LONG, Ticks, World, quick};

/// Returns the members of a world, and the address from which the last one has connected. A changed
/// message loses that member.
fn changed(direction: Direction, spot: Spot) -> (Vec<Membership>, String) {
    let world = World::of(3, quick());
    let (way, members) = Way::in_world(&world);
    way.change(direction, spot);
    let started = Ticks::start();
    for member in &members[..2] {
        let status = wait_for(member, LONG, |status| !lost(status).is_empty());
        let why = match direction {
            Direction::ToCoordinator => "a message from it failed authentication",
            Direction::ToMember => "a message to it failed authentication",
        };
        let lost = State::Lost { loss: Loss::Forged, why: why.into() };
        assert_eq!(status.states[2], lost, "{direction:?}, {spot:?}");
    }
    wait_for(&members[2], LONG, |status| status.ended.is_some());
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    (members, way.address.to_string())
}

#[test]
fn a_changed_message_from_a_member_is_told_to_all() {
    for spot in [Spot::Mac, Spot::Head] {
        let (members, address) = changed(Direction::ToCoordinator, spot);
        let said = members[2].status().ended.as_ref().map(ConnectionError::to_string);
        let expected = format!(
            "the coordinator at {address} has declared rank 2 lost: a message from it failed authentication"
        );
        assert_eq!(said, Some(expected), "{spot:?}");
    }
}

/// Only the member sees that the message is wrong. It tells the coordinator.
#[test]
fn a_changed_message_to_a_member_is_told_to_all() {
    for spot in [Spot::Mac, Spot::Head] {
        let (members, address) = changed(Direction::ToMember, spot);
        let said = members[2].status().ended.as_ref().map(ConnectionError::to_string);
        let expected = format!(
            "rank 2 has ended its connection to the coordinator at {address}: a message to it failed authentication"
        );
        assert_eq!(said, Some(expected), "{spot:?}");
    }
}

/// HTTP/2 itself ends the connection. The coordinator may see that where it reads or where it
/// writes, and it says the same.
#[test]
fn a_broken_connection_is_told_as_ended_while_messages_flow() {
    for _ in 0..8 {
        let world = World::of(2, quick());
        let (way, members) = Way::in_world(&world);
        let [near, far] = &members[..] else { panic!("two members") };
        way.change(Direction::ToCoordinator, Spot::Stream);
        let started = Instant::now();
        let mut under_way = 0;
        while lost(&near.status()).is_empty() && started.elapsed() < LONG {
            while under_way < near.most_passed() {
                near.pass(&[(Rank::new(1), 0)], vec![0; 100].into())
                    .expect("it is passed on, or dropped");
                under_way += 1;
            }
            while far.take_passed().is_some() {
                under_way -= 1;
            }
        }
        let why = "its connection ended before it left".into();
        let lost = State::Lost { loss: Loss::Ended, why };
        assert_eq!(near.status().states[1], lost);
    }
}
