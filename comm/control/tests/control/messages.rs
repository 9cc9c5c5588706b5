//! Messages between members.

use std::time::{Duration, Instant};

use hsdp_control::{MOST_MESSAGE, Membership, Passed, Rank};

use crate::exchange::{Exchange, lost, wait_for};
use crate::world::{LONG, World, each, quick};

fn all<R: Send>(members: &[Membership], does: impl Fn(&Membership) -> R + Sync) -> Vec<R> {
    each(members.iter().collect(), does)
}

#[test]
fn messages_of_any_size_come_from_all_ranks() {
    let world = World::of(4, quick());
    let members = world.join();
    for bytes in [0, 1, 128, MOST_MESSAGE] {
        let value = |rank: Rank| vec![rank.get().to_le_bytes()[0]; bytes];
        let got = all(&members, |one| Exchange::of(one).round(&value(one.rank())).expect("values"));
        let expected: Vec<Vec<u8>> = (0..4).map(|rank| value(Rank::new(rank))).collect();
        assert!(got.iter().all(|values| *values == expected), "{bytes} bytes");
    }
}

#[test]
fn rounds_follow_each_other_at_once() {
    let world = World::of(3, quick());
    let members = world.join();
    all(&members, |one| {
        let mut exchange = Exchange::of(one);
        for round in 0..200_u32 {
            let given = round + one.rank().get();
            let values = exchange.round(&given.to_le_bytes()).expect("values");
            let expected: Vec<_> =
                (0..3).map(|rank| (round + rank).to_le_bytes().to_vec()).collect();
            assert_eq!(values, expected);
        }
    });
}

#[test]
fn what_is_passed_comes_in_order_and_to_nobody_else() {
    let world = World::of(3, quick());
    let members = world.join();
    let most = members[0].most_passed();
    for number in 0..most {
        members[0]
            .pass(&[(Rank::new(2), 0)], number.to_le_bytes().to_vec().into())
            .expect("it is passed");
    }
    members[1].pass(&[(Rank::new(2), 0)], vec![7; MOST_MESSAGE].into()).expect("it is passed");
    let too_long = members[1]
        .pass(&[(Rank::new(2), 0)], vec![7; MOST_MESSAGE + 1].into())
        .map_err(|it| it.to_string());
    assert_eq!(too_long, Err("the message has 65537 bytes, at most 65536 are allowed".to_owned()));
    let until = Instant::now() + Duration::from_secs(10);
    let mut came = [Vec::new(), Vec::new()];
    while came[0].len() < most || came[1].is_empty() {
        assert!(Instant::now() < until, "{} have come", came[0].len());
        let Some(Passed { from, message, .. }) = members[2].take_passed() else { continue };
        came[from.index()].push(message);
    }
    let expected: Vec<_> = (0..most).map(|number| number.to_le_bytes().to_vec()).collect();
    assert_eq!(came[0], expected);
    assert_eq!(came[1], [vec![7; MOST_MESSAGE]]);
    assert_eq!((members[0].take_passed(), members[1].take_passed()), (None, None));
}

#[test]
fn one_message_to_many_has_a_number_for_each() {
    let world = World::of(3, quick());
    let members = world.join();
    let to = [(0, 3), (1, u32::MAX), (2, 0)].map(|(rank, number)| (Rank::new(rank), number));
    members[1].pass(&to, b"to all".as_slice().into()).expect("it is passed");
    let until = Instant::now() + Duration::from_secs(10);
    for (member, (_, number)) in members.iter().zip(to) {
        let taken = loop {
            assert!(Instant::now() < until, "nothing has come");
            let Some(taken) = member.take_passed() else { continue };
            break taken;
        };
        let message = b"to all".as_slice().into();
        assert_eq!(taken, Passed { from: Rank::new(1), number, message });
    }
}

#[test]
fn who_passes_one_message_to_a_rank_twice_is_lost() {
    let world = World::of(2, quick());
    let members = world.join();
    let twice = [(Rank::new(1), 0); 2];
    members[0].pass(&twice, b"twice".as_slice().into()).expect("it is on its way");
    let status = wait_for(&members[1], Duration::from_secs(5), |status| !lost(status).is_empty());
    assert_eq!(lost(&status), [Rank::new(0)]);
    assert_eq!(members[1].take_passed(), None);
}

#[test]
fn members_that_pass_much_to_each_other_do_not_wait_for_each_other() {
    let world = World::of(2, quick());
    let members = world.join();
    let most = members[0].most_passed();
    all(&members, |one| {
        let other = Rank::new(1 - one.rank().index());
        let mut sent = 0;
        let mut came = 0;
        let mut last = Instant::now();
        // More than the network buffers, before any member reads.
        while came < 4 * most {
            assert!(last.elapsed() < LONG, "{came} have come, and no more");
            while sent < 4 * most && sent < came + most {
                one.pass(&[(other, 0)], vec![1; MOST_MESSAGE].into()).expect("it is passed");
                sent += 1;
            }
            if one.take_passed().is_some() {
                (came, last) = (came + 1, Instant::now());
            }
        }
    });
}

#[test]
fn who_passes_something_to_nobody_is_lost() {
    let world = World::of(2, quick());
    let members = world.join();
    members[0].pass(&[(Rank::new(2), 0)], b"for nobody".to_vec().into()).expect("it is on its way");
    let status = wait_for(&members[1], Duration::from_secs(5), |status| !lost(status).is_empty());
    assert_eq!(lost(&status), [Rank::new(0)]);
}
