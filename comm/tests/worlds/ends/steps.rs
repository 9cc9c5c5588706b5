//! Steps that are given up: all ranks discard the epoch, and the next one is clean.

use hsdp_comm::{Channel, Error, Reduction, StepFailure, World, WorldOptions};

use super::{settled, sum, tag};
use crate::common::outcomes;

#[test]
fn an_aborted_step_ends_everywhere_and_the_next_epoch_is_clean() {
    let ends = outcomes(4, WorldOptions::default(), |world| {
        let gather = world.world_group(Channel::Gather);
        // Numbers differ between the ranks when the step is given up: they must not afterwards.
        let ahead = world.rank().index();
        let pending: Vec<_> = (0..ahead).map(|_| gather.all_gather(tag(), vec![1_u32])).collect();
        if world.rank().index() == 0 {
            world.abort_step(StepFailure { step: 7, reason: "the data loader broke".to_owned() });
        }
        for pending in pending {
            let end = settled(pending).expect_err("the step is aborted");
            assert_eq!(end.to_string(), "step 7 aborted by rank 0: the data loader broke");
            assert!(!end.is_fatal());
        }
        // Calls in the old epoch are refused until this rank goes on.
        let refused = sum(&world, vec![1.0]).expect_err("rank 0 takes no part in this epoch");
        assert!(matches!(refused, Error::StepAborted { step: 7, .. }), "{refused}");
        assert_eq!(world.next_epoch(), 1);
        assert_eq!(world.next_epoch(), 1, "an epoch that is not aborted is not left");
        let gathered = settled(gather.all_gather(tag(), vec![world.rank().get()]))?;
        Ok::<_, Error>((gathered, sum(&world, vec![1.0])?))
    });
    for end in ends {
        assert_eq!(end, Ok(Ok((vec![0, 1, 2, 3], vec![4.0]))));
    }
}

#[test]
fn ranks_that_abort_at_once_all_name_the_same_rank() {
    for _ in 0..50 {
        let ends = outcomes(4, WorldOptions::default(), |world| {
            let end_of = |step| {
                let rank = world.rank();
                if rank.index().is_multiple_of(2) {
                    world.abort_step(StepFailure { step, reason: format!("rank {rank} gives up") });
                }
                let end = sum(&world, vec![1.0]).expect_err("the step is aborted");
                assert_eq!(world.next_epoch(), step + 1);
                assert_eq!(sum(&world, vec![1.0]), Ok(vec![4.0]));
                end
            };
            (0..5).map(end_of).collect::<Vec<_>>()
        });
        let ends: Vec<Vec<Error>> = ends.into_iter().map(|it| it.expect("no panic")).collect();
        for (step, end) in ends[0].iter().enumerate() {
            let Error::StepAborted { rank, step: aborted, reason, .. } = end else {
                panic!("{end}")
            };
            assert_eq!((*aborted, rank.index() % 2), (step as u64, 0));
            assert_eq!(**reason, format!("rank {rank} gives up"));
        }
        assert!(ends.iter().all(|of_rank| *of_rank == ends[0]), "{ends:?}");
    }
}

#[test]
fn a_rank_in_the_next_epoch_waits_for_those_in_the_old_one() {
    let ends = outcomes(2, WorldOptions::default(), |world| {
        if world.rank().index() == 0 {
            world.abort_step(StepFailure { step: 0, reason: "first".to_owned() });
            world.next_epoch();
            // Rank 1 is still in epoch 0.
            return sum(&world, vec![1.0]);
        }
        while sum(&world, vec![1.0]).is_ok() {}
        world.next_epoch();
        sum(&world, vec![2.0])
    });
    assert_eq!(ends, [Ok(Ok(vec![3.0])), Ok(Ok(vec![3.0]))]);
}

#[test]
fn a_step_of_an_epoch_that_its_rank_has_left_is_given_up_by_nobody() {
    let ends = outcomes(2, WorldOptions::default(), |world| {
        let failure = |reason: &str| StepFailure { step: 0, reason: reason.to_owned() };
        let epoch = world.epoch();
        world.abort_step_of(epoch, failure("first"));
        let end = sum(&world, vec![1.0]).expect_err("the step is aborted");
        world.next_epoch();
        world.abort_step_of(epoch, failure("too late"));
        world.abort_step_of(world.epoch() + 1, failure("too early"));
        let summed = sum(&world, vec![1.0]);
        (end.is_fatal(), summed, world.epoch())
    });
    for end in ends {
        assert_eq!(end, Ok((false, Ok(vec![2.0]), 1)));
    }
}

#[test]
fn work_that_has_begun_completes_when_the_step_is_aborted() {
    let worlds = World::local(2, WorldOptions::default());
    let values = vec![1_f32; 1 << 20];
    let pending: Vec<_> = worlds
        .iter()
        .map(|world| {
            world.world_group(Channel::User).all_reduce(tag(), Reduction::Sum, values.clone())
        })
        .collect();
    worlds[0].abort_step(StepFailure { step: 0, reason: "too late for this one".to_owned() });
    for pending in pending {
        assert!(settled(pending).is_ok_and(|sum| sum == vec![2_f32; 1 << 20]));
    }
}
