//! Mistakes between steps that all ranks may make: one that a rank announces ends one epoch.

use std::time::Duration;

use hsdp_comm::{
    Between, Channel, Error, Group, Mistake, Pending, StepFailure, World, WorldOptions,
};

use hsdp_sharding::Rank;

use super::{settled, sum, tag};
use crate::common::outcomes;

const BETWEEN: [Between; 2] = [Between::Memory, Between::Messages];

/// Rounds of a test, each with other epochs.
const ROUNDS: u64 = 20;

fn options(between: Between) -> WorldOptions {
    WorldOptions { between, deadline: Duration::from_secs(20), ..WorldOptions::default() }
}

/// Fails in a call, which any rank may do, and goes on.
fn fail(world: &World, round: u64) {
    let failure = StepFailure { step: round, reason: format!("rank {} is wrong", world.rank()) };
    world.announce_mistake(world.epoch(), failure, Mistake::of(&("a call", round)));
    world.next_epoch();
}

/// Goes on after `call`, which an abort by `by` must have ended.
fn go_on_after<T: std::fmt::Debug>(world: &World, by: usize, call: Result<T, Error>) {
    let rank = Rank::new(by);
    let is_aborted = matches!(call, Err(Error::StepAborted { rank: found, .. }) if found == rank);
    assert!(is_aborted, "rank {} after the abort by rank {by}: {call:?}", world.rank());
    world.next_epoch();
}

fn barrier(group: &Group) -> Result<(), Error> {
    settled(group.barrier(tag()))
}

fn run_all(size: usize, between: Between, rank: impl Fn(World) + Sync) {
    outcomes(size, options(between), rank).into_iter().for_each(|end| end.expect("no panic"));
}

/// Any operation in which the rank that was ahead takes part shows that it is not ahead of this
/// rank any longer.
#[test]
fn a_mistake_is_announced_after_any_operation_with_the_rank_that_was_ahead() {
    type Meeting = fn(&World) -> Result<(), Error>;
    let meetings: [Meeting; 4] = [
        |world| sum(world, vec![1.0]).map(drop),
        |world| barrier(&world.world_group(Channel::Reduce)),
        |world| world.sum(1.0).map(drop),
        |world| {
            let group = world.world_group(Channel::User);
            let value = match world.rank().index() {
                0 => group.recv::<u32>(tag(), 1, 1)?.wait()?,
                _ => group.send(tag(), 0, vec![7_u32]).and_then(Pending::wait).map(|()| vec![7])?,
            };
            assert_eq!(value, [7]);
            Ok(())
        },
    ];
    for between in BETWEEN {
        run_all(2, between, |world| {
            for (round, meet) in (0..ROUNDS).zip(meetings.iter().cycle()) {
                match world.rank().index() {
                    0 => go_on_after(&world, 1, sum(&world, vec![1.0])),
                    _ => fail(&world, round),
                }
                meet(&world).expect("the operation is of the next epoch");
                match world.rank().index() {
                    0 => fail(&world, round),
                    _ => go_on_after(&world, 0, sum(&world, vec![1.0])),
                }
                assert_eq!(sum(&world, vec![1.0]), Ok(vec![2.0]));
            }
        });
    }
}

/// Operations without the rank that is ahead show nothing about it: the others make its mistake,
/// and the epoch in which it goes on does not end.
#[test]
fn a_mistake_is_not_announced_twice_after_operations_without_the_rank_that_is_ahead() {
    for between in BETWEEN {
        run_all(3, between, |world| {
            for round in 0..ROUNDS {
                if world.rank().index() == 2 {
                    fail(&world, round);
                } else {
                    let behind = [0, 1].map(Rank::new);
                    let behind = world.group(&behind, Channel::User).expect("a group");
                    let end = (0..).map(|_| barrier(&behind)).find(Result::is_err);
                    go_on_after(&world, 2, end.expect("an operation is refused"));
                    barrier(&behind).expect("the operation is of the next epoch");
                    fail(&world, round);
                }
                assert_eq!(sum(&world, vec![1.0]), Ok(vec![3.0]), "round {round}");
            }
        });
    }
}

/// A rank that is far ahead has failed in two calls, and another one got both aborts before its own
/// calls.
#[test]
fn two_mistakes_of_a_rank_that_is_ahead_end_two_epochs() {
    for between in BETWEEN {
        run_all(2, between, |world| {
            for round in 0..ROUNDS {
                let [first, second] = [2 * round, 2 * round + 1];
                if world.rank().index() == 0 {
                    for _ in 0..2 {
                        go_on_after(&world, 1, barrier(&world.world_group(Channel::Gather)));
                    }
                }
                fail(&world, first);
                fail(&world, second);
                assert_eq!(sum(&world, vec![1.0]), Ok(vec![2.0]), "round {round}");
            }
        });
    }
}
