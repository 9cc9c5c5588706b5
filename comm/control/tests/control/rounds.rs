//! Values by name.

use std::time::{Duration, Instant};

use hsdp_control::{ControlError, MOST_VALUE, Membership, Rank};

use crate::world::{World, each, quick};

fn all<R: Send>(members: &[Membership], does: impl Fn(&Membership) -> R + Sync) -> Vec<R> {
    each(members.iter().collect(), does)
}

#[test]
fn values_of_any_size_come_in_the_order_of_ranks() {
    let world = World::of(4, quick());
    let members = world.join();
    for bytes in [0, 1, 128, MOST_VALUE] {
        let value = |rank: Rank| vec![rank.get().to_le_bytes()[0]; bytes];
        let got = all(&members, |one| one.exchange("sizes", &value(one.rank())).expect("values"));
        let expected: Vec<Vec<u8>> = (0..4).map(|rank| value(Rank::new(rank))).collect();
        assert!(got.iter().all(|values| *values == expected), "{bytes} bytes");
    }
}

#[test]
fn a_key_may_be_used_again_at_once() {
    let world = World::of(3, quick());
    let members = world.join();
    all(&members, |one| {
        for round in 0..200_u32 {
            let given = round + one.rank().get();
            let values = one.exchange("again", &given.to_le_bytes()).expect("values");
            let expected: Vec<_> =
                (0..3).map(|rank| (round + rank).to_le_bytes().to_vec()).collect();
            assert_eq!(values, expected);
        }
    });
}

#[test]
fn keys_do_not_wait_for_each_other() {
    let world = World::of(2, quick());
    let members = world.join();
    let calls: Vec<(&Membership, u32)> =
        members.iter().flat_map(|one| (0..16).map(move |key| (one, key))).collect();
    let got = each(calls, |(one, key)| {
        let value = [key.to_le_bytes()[0], one.rank().get().to_le_bytes()[0]];
        one.exchange(&format!("key {key}"), &value).map(|values| (key, values))
    });
    for outcome in got {
        let (key, values) = outcome.expect("values");
        let key = key.to_le_bytes()[0];
        assert_eq!(values, [vec![key, 0], vec![key, 1]]);
    }
}

#[test]
fn one_rank_gives_what_all_get() {
    let world = World::of(3, quick());
    let members = world.join();
    for root in 0..3 {
        let got = all(&members, |one| {
            let value = format!("of {root}");
            let gives = one.rank() == Rank::new(root);
            one.broadcast("root", gives.then_some(value.as_bytes())).expect("a value")
        });
        assert!(got.iter().all(|value| *value == format!("of {root}").into_bytes()));
    }
    let none = all(&members, |one| one.broadcast("nobody", None).expect_err("no giver"));
    assert_eq!(
        none[0].to_string(),
        "`nobody`: exactly one rank must give the value of a broadcast, but ranks [] did"
    );
    assert!(none.iter().all(|error| *error == none[0]));
}

#[test]
fn who_has_not_come_is_named_to_all_alike() {
    let world = World::of(3, quick());
    let members = world.join();
    let started = Instant::now();
    let late = all(&members[..2], |one| one.exchange("id", b"x").expect_err("one is missing"));
    let took = started.elapsed();
    assert!(took > Duration::from_millis(900) && took < Duration::from_secs(2), "{took:?}");
    let expected = "`id`: after 1s ranks [2] have not joined; ranks [0, 1] have";
    assert!(late.iter().all(|error| error.to_string() == expected), "{late:?}");
    let last = members[2].exchange("id", b"x").expect_err("it was too late");
    assert_eq!(last, late[0]);
    let again = all(&members, |one| one.exchange("id", b"x"));
    assert!(again.iter().all(Result::is_ok), "all have been told: {again:?}");
}

#[test]
fn what_is_too_long_is_refused_on_the_spot() {
    let world = World::of(1, quick());
    let members = world.join();
    let refused = members[0].exchange("long", &vec![0; MOST_VALUE + 1]).expect_err("too long");
    assert_eq!(refused.to_string(), "the value has 65537 bytes, at most 65536 are allowed");
    let refused = members[0].exchange(&"k".repeat(257), b"").expect_err("too long");
    assert_eq!(refused.to_string(), "the key has 257 bytes, at most 256 are allowed");
    members[0].exchange(&"k".repeat(256), &vec![1; MOST_VALUE]).expect("as long as may be");
}

#[test]
fn a_key_is_one_threads_at_a_time() {
    let world = World::of(2, quick());
    let members = world.join();
    let both = each(vec![(), ()], |()| members[0].exchange("busy", b"x"));
    let busy = both.iter().filter(|one| matches!(one, Err(ControlError::KeyBusy { .. })));
    assert_eq!(busy.count(), 1, "{both:?}");
    let late = both.iter().filter(|one| matches!(one, Err(ControlError::Late { .. })));
    assert_eq!(late.count(), 1, "{both:?}");
}

#[test]
fn kinds_are_not_mixed() {
    let world = World::of(2, quick());
    let members = world.join();
    let mixed = all(&members, |one| match one.rank().get() {
        0 => one.exchange("mixed", b"x").map(drop),
        _ => one.broadcast("mixed", None).map(drop),
    });
    for outcome in mixed {
        let said = outcome.expect_err("mixed").to_string();
        assert_eq!(said, "`mixed`: ranks [0] exchange, ranks [1] broadcast");
    }
}

#[test]
fn what_is_passed_comes_in_order_and_to_nobody_else() {
    let world = World::of(3, quick());
    let members = world.join();
    let most = members[0].most_passed();
    for number in 0..most {
        members[0].pass(Rank::new(2), number.to_le_bytes().to_vec()).expect("it is passed");
    }
    members[1].pass(Rank::new(2), vec![7; MOST_VALUE]).expect("it is passed");
    let too_long =
        members[1].pass(Rank::new(2), vec![7; MOST_VALUE + 1]).map_err(|it| it.to_string());
    assert_eq!(too_long, Err("the message has 65537 bytes, at most 65536 are allowed".to_owned()));
    let (until, mut came) = (Instant::now() + Duration::from_secs(10), [Vec::new(), Vec::new()]);
    while came[0].len() < most || came[1].is_empty() {
        assert!(Instant::now() < until, "{} have come", came[0].len());
        let Some((from, what)) = members[2].take_passed() else { continue };
        came[from.index()].push(what);
    }
    let expected: Vec<_> = (0..most).map(|number| number.to_le_bytes().to_vec()).collect();
    assert_eq!(came[0], expected);
    assert_eq!(came[1], [vec![7; MOST_VALUE]]);
    assert_eq!((members[0].take_passed(), members[1].take_passed()), (None, None));
}

#[test]
fn members_that_pass_much_to_each_other_do_not_wait_for_each_other() {
    let world = World::of(2, quick());
    let members = world.join();
    let most = members[0].most_passed();
    all(&members, |one| {
        let other = Rank::new(1 - one.rank().index());
        let (mut sent, mut came, until) = (0, 0, Instant::now() + Duration::from_secs(20));
        // More than the network buffers, before any member reads.
        while came < 4 * most {
            assert!(Instant::now() < until, "{came} have come");
            while sent < 4 * most && sent < came + most {
                one.pass(other, vec![1; MOST_VALUE]).expect("it is passed");
                sent += 1;
            }
            came += usize::from(one.take_passed().is_some());
        }
    });
}

#[test]
fn who_passes_something_to_nobody_is_lost() {
    let world = World::of(2, quick());
    let members = world.join();
    members[0].pass(Rank::new(2), b"for nobody".to_vec()).expect("it is on its way");
    let status = members[1].wait_for(Duration::from_secs(5), |status| !status.lost().is_empty());
    assert_eq!(status.lost(), [Rank::new(0)]);
}
