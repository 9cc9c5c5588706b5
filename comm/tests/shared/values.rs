//! Small values of the user: sums and means in rank order, values that one rank hands out; on ranks that share memory and on ranks that
//! do not.

use std::time::{Duration, Instant};

use hsdp_comm::CallError::{BadRank, Refused};
use hsdp_comm::WorldError::{Aborted, Mismatch};
use hsdp_comm::{AbortReason, Between, Channel, Error, Op, World, WorldOptions};
use hsdp_sharding::Rank;

use crate::common::outcomes;

const SIZES: [usize; 5] = [1, 2, 3, 5, 7];
const BETWEEN: [Between; 2] = [Between::Memory, Between::Messages];

fn run<T: Send>(size: usize, between: Between, rank: impl Fn(World) -> T + Sync) -> Vec<T> {
    let deadline = Duration::from_secs(20);
    let options = WorldOptions { between, deadline, ..WorldOptions::default() };
    outcomes(size, options, rank).into_iter().map(|it| it.expect("no rank panics")).collect()
}

/// Values whose sum depends on the order of additions.
fn value(rank: usize) -> f64 {
    [1e16, 1.0, -1e16, 0.1, 1e-20, 3.0, -7.7][rank]
}

#[test]
fn sums_and_means_are_those_in_rank_order_on_all_ranks() {
    for (size, between) in SIZES.into_iter().flat_map(|size| BETWEEN.map(|it| (size, it))) {
        let sum = (1..size).fold(value(0), |sum, rank| sum + value(rank));
        let mean = sum / f64::from(u32::try_from(size).expect("small"));
        for of_rank in run(size, between, |world| {
            let mine = value(world.rank().index());
            Ok::<_, Error>([world.sum(mine)?, world.mean(mine)?])
        }) {
            let of_rank = of_rank.expect("numbers").map(f64::to_bits);
            assert_eq!(of_rank, [sum, mean].map(f64::to_bits), "{size} ranks, {between:?}");
        }
    }
}

#[test]
fn all_ranks_get_the_value_of_one() {
    type Value = (String, Option<Vec<f64>>, u8);
    let value = |rank: usize, len: usize| -> Value {
        let numbers = (0..len).map(|it| it as f64 + rank as f64 / 8.0).collect();
        (format!("rank {rank}"), (rank > 0).then_some(numbers), 3)
    };
    for (size, between) in SIZES.into_iter().flat_map(|size| BETWEEN.map(|it| (size, it))) {
        let handed_out = run(size, between, |world| {
            let rank = world.rank().index();
            let last = Rank::new(world.size() - 1);
            let first = world.broadcast(value(rank, 3), Rank::new(0))?;
            world.broadcast((), last)?;
            // Ranks have values of different sizes.
            let long = world.broadcast(value(rank, 1000 * rank), last)?;
            Ok::<_, Error>((first, long))
        });
        for of_rank in handed_out {
            let expected = (value(0, 3), value(size - 1, 1000 * (size - 1)));
            assert_eq!(of_rank, Ok(expected), "{size} ranks, {between:?}");
        }
    }
}

#[test]
fn a_value_of_more_than_a_mebibyte_is_refused_on_all_ranks_and_the_world_goes_on() {
    for between in BETWEEN {
        // Text of `len` bytes below 2^21 has its length before it, in three bytes.
        let text = |len: usize| "x".repeat(len - 3);
        for (rank, results) in run(3, between, |world| {
            let hand_out = |len| {
                let mine = if world.rank().index() == 2 { text(len) } else { String::new() };
                world.broadcast(mine, Rank::new(2)).map(|text| text.len())
            };
            (hand_out((1 << 20) + 1), hand_out(1 << 20), world.sum(1.0))
        })
        .into_iter()
        .enumerate()
        {
            let (refused, handed_out, sum) = results;
            assert_eq!(
                refused.expect_err("too long").to_string(),
                format!(
                    "broadcast on rank {rank}: the value of rank 2 has 1048577 bytes, at most 1048576 go: hand out a name of it, such \
                     as that of a file"
                )
            );
            assert_eq!((handed_out, sum), (Ok((1 << 20) - 3), Ok(3.0)));
        }
    }
}

#[test]
fn a_rank_that_is_not_in_the_world_hands_out_nothing() {
    for refused in run(2, Between::Memory, |world| world.broadcast(1, Rank::new(2))) {
        assert_eq!(refused, Err(BadRank { rank: Rank::new(2), size: 2 }.into()));
    }
}

#[test]
fn a_value_of_another_type_is_refused_by_the_rank_that_asked_for_it() {
    let read = run(2, Between::Memory, |world| match world.rank().index() {
        0 => world.broadcast(7_u8, Rank::new(0)).map(|_| ()),
        _ => world.broadcast(String::new(), Rank::new(0)).map(|_| ()),
    });
    assert_eq!(read[0], Ok(()));
    let Err(Error::Call(Refused { op: Op::Broadcast, rank, problem })) = &read[1] else {
        panic!("{read:?}")
    };
    assert_eq!(*rank, Rank::new(1));
    assert!(problem.starts_with("the value of rank 0 has another type: "), "{problem}");
}

#[test]
fn ranks_that_name_different_ranks_all_get_the_table() {
    for between in BETWEEN {
        for error in run(3, between, |world| {
            let from = Rank::new(usize::from(world.rank().index() == 2));
            world.broadcast(5, from)
        }) {
            assert!(matches!(error, Err(Error::World(Mismatch(..)))), "{error:?}");
        }
    }
}

/// The error names the rank that left and the last operation that it issued.
#[test]
fn a_rank_that_leaves_ends_the_wait_of_the_others() {
    for between in BETWEEN {
        let started = Instant::now();
        let ends = run(3, between, |world| {
            world.sum(1.0).expect("all are there");
            match world.rank().index() {
                0 => None,
                1 => Some(world.broadcast(2.0, Rank::new(1))),
                _ => Some(world.broadcast(0.0, Rank::new(1))),
            }
        });
        assert!(started.elapsed() < Duration::from_secs(10), "no rank waits for the deadline");
        for end in ends.into_iter().flatten() {
            let Err(Error::World(Aborted { rank, operation, reason, .. })) = &end else {
                panic!("{end:?}")
            };
            assert_eq!(*rank, Rank::new(0));
            assert!(matches!(reason, AbortReason::Left { .. }), "{reason:?}");
            let last = operation.as_ref().expect("it has issued one");
            assert_eq!((last.channel, last.op), (Channel::Control, Op::AllGather));
        }
    }
}

#[test]
fn ranks_without_data_take_part() {
    let sums = run(2, Between::Memory, |world| {
        world.set_absent(&[Rank::new(1)]);
        world.sum(2.0)
    });
    assert_eq!(sums, [Ok(4.0), Ok(4.0)]);
}

#[test]
fn a_world_without_peers_has_its_own_values() {
    let world = World::counting(4, Rank::new(1)).expect("a world");
    assert_eq!((world.sum(1.5), world.mean(1.5)), (Ok(6.0), Ok(1.5)));
    assert_eq!(world.broadcast(7, Rank::new(1)), Ok(7));
}
