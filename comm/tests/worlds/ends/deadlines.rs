//! Deadlines: every wait ends, and the end names whose doing it is.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{Channel, Error, Reduction, WorldOptions};
use hsdp_sharding::Rank;

use super::{settled, sum, tag};
use crate::common::outcomes;

#[test]
fn a_missed_deadline_names_who_is_missing_on_all_ranks() {
    let options = WorldOptions { deadline: Duration::from_millis(200), ..WorldOptions::default() };
    // On a busy machine ranks may start late: nobody waits before all that come have come.
    let all = Barrier::new(3);
    let two = Barrier::new(2);
    let over = Barrier::new(3);
    let ends = outcomes(3, options, |world| {
        world.set_step(7);
        let group = world.world_group(Channel::User);
        let first = group.all_reduce(tag(), Reduction::Sum, vec![1_f32]);
        all.wait();
        settled(first).expect("the first one is complete");
        let end = if world.rank().index() == 1 {
            // Comes too late: when the others have given up.
            over.wait();
            sum(&world, vec![1.0])
        } else {
            let second = group.all_reduce(tag(), Reduction::Sum, vec![1_f32]);
            two.wait();
            let end = settled(second);
            over.wait();
            end
        };
        end.expect_err("the deadline passes")
    });
    for end in ends {
        let Ok(Error::World(Aborted { rank, step, operation, reason })) = end else {
            panic!("{end:?}")
        };
        assert_eq!((rank, step), (Rank::new(1), 7));
        assert_eq!(operation.expect("it was in one before").sequence, 0);
        assert_eq!(
            reason.to_string(),
            "deadline of 200ms missed in all_reduce sum f32 1 element, all_reduce, step 7, microbatch 0 \
             (operation 1 on channel user, epoch 0); arrived: ranks [0, 2], missing: ranks [1]"
        );
    }
}

#[test]
fn a_rank_that_waits_itself_is_not_named() {
    // Rank 2 hangs; rank 1 waits for it, and rank 0 for rank 1: whoever's deadline passes first names rank 2.
    let options = WorldOptions { deadline: Duration::from_secs(1), ..WorldOptions::default() };
    let all = Barrier::new(3);
    let over = Barrier::new(3);
    let ends = outcomes(3, options, |world| {
        let rank = world.rank().index();
        all.wait();
        let end = (rank < 2).then(|| {
            let pair = world.group(&[rank, rank + 1].map(Rank::new), Channel::User);
            let issued = pair.and_then(|pair| pair.all_reduce(tag(), Reduction::Sum, vec![1_f32]));
            settled(issued).expect_err("rank 2 never comes")
        });
        over.wait();
        end
    });
    let ends: Vec<Error> = ends.into_iter().flat_map(|end| end.expect("no panic")).collect();
    assert_eq!(ends.len(), 2);
    for end in ends {
        assert!(matches!(end, Error::World(Aborted { rank, .. }) if rank == Rank::new(2)), "{end}");
    }
}

#[test]
fn a_deadline_may_be_of_any_length() {
    for late in [Duration::ZERO, Duration::MAX] {
        let options = WorldOptions { deadline: Duration::MAX, late, ..WorldOptions::default() };
        let barrier = Barrier::new(2);
        let sums = outcomes(2, options, |world| {
            // One of them waits for the other, asleep.
            let group = world.world_group(Channel::User);
            let first = group.all_reduce(tag(), Reduction::Sum, vec![1_f32; 100_000])?.wait()?;
            barrier.wait();
            if world.rank().index() == 1 {
                let started = Instant::now();
                while started.elapsed() < Duration::from_millis(20) {
                    std::thread::yield_now();
                }
            }
            assert_eq!(first, sum(&world, vec![1.0; 100_000])?);
            Ok::<_, Error>(first[0])
        });
        assert_eq!(sums, [Ok(Ok(2.0)), Ok(Ok(2.0))]);
    }
}
