//! Ranks that wait for each other: always found, and never where they do not. A member looks once, when its wait begins.

use std::time::Duration;

use hsdp_comm::WorldError::Mismatch;
use hsdp_comm::{Channel, Error, Pending, Tag, World, WorldOptions};
use hsdp_sharding::Rank;
use shuttle::thread;

use super::{all_schedules, options, run, schedules, settled};

/// The grace is over when a wait begins.
fn worlds(size: usize) -> Vec<World> {
    World::local(size, WorldOptions { circle_grace: Duration::ZERO, ..options(0) })
}

fn barrier(world: &World, channel: Channel) -> Result<Pending<()>, Error> {
    world.world_group(channel).barrier(Tag::default())
}

/// A barrier of two ranks.
fn between(world: &World, pair: [usize; 2]) -> Result<Pending<()>, Error> {
    world.group(&pair.map(Rank::new), Channel::User)?.barrier(Tag::default())
}

#[test]
fn two_ranks_that_are_stuck_are_told_so() {
    all_schedules(20_000, || {
        let ends = run(&worlds(2), |world| {
            let channel = [Channel::User, Channel::Control][world.rank().index()];
            settled(barrier(&world, channel)).expect_err("none of them goes on")
        });
        assert_eq!(ends[0], ends[1]);
        assert!(matches!(ends[0], Error::World(Mismatch(..))), "{}", ends[0]);
    });
}

#[test]
fn three_ranks_that_wait_around_a_ring_are_told_so() {
    schedules(|| {
        let ends = run(&worlds(3), |world| {
            let pair = [[0, 1], [1, 2], [2, 0]][world.rank().index()];
            settled(between(&world, pair)).expect_err("none of them goes on")
        });
        assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
        assert!(matches!(ends[0], Error::World(Mismatch(..))), "{}", ends[0]);
    });
}

#[test]
fn ranks_that_issue_before_they_wait_are_never_stuck() {
    schedules(|| {
        let outcomes = run(&worlds(2), |world| {
            if world.rank().index() == 0 {
                settled(barrier(&world, Channel::User))?;
                return settled(barrier(&world, Channel::Control));
            }
            let control = barrier(&world, Channel::Control)?;
            settled(barrier(&world, Channel::User))?;
            control.wait()
        });
        assert_eq!(outcomes, [Ok(()), Ok(())]);
    });
}

#[test]
fn a_ring_that_one_rank_opens_is_never_a_circle() {
    schedules(|| {
        let outcomes = run(&worlds(3), |world| match world.rank().index() {
            0 => {
                settled(between(&world, [0, 1]))?;
                settled(between(&world, [2, 0]))
            }
            1 => {
                settled(between(&world, [1, 2]))?;
                settled(between(&world, [0, 1]))
            }
            _ => {
                let last = between(&world, [2, 0])?;
                settled(between(&world, [1, 2]))?;
                last.wait()
            }
        });
        assert_eq!(outcomes, [Ok(()), Ok(()), Ok(())]);
    });
}

#[test]
fn ranks_that_go_from_one_wait_to_the_next_are_never_stuck() {
    // A look sees each rank at another moment: once in this wait, once in that.
    schedules(|| {
        let outcomes = run(&worlds(3), |world| {
            let pairs: [[usize; 2]; 4] = match world.rank().index() {
                0 => [[0, 1], [2, 0], [0, 1], [2, 0]],
                1 => [[0, 1], [1, 2], [0, 1], [1, 2]],
                _ => [[1, 2], [2, 0], [1, 2], [2, 0]],
            };
            pairs.into_iter().try_for_each(|pair| settled(between(&world, pair)))
        });
        assert_eq!(outcomes, [Ok(()), Ok(()), Ok(())]);
    });
}

#[test]
fn a_rank_that_has_issued_from_two_threads_is_never_stuck() {
    schedules(|| {
        let outcomes = run(&worlds(2), |world| {
            drop(barrier(&world, Channel::Gather));
            if world.rank().index() == 0 {
                drop(barrier(&world, Channel::Reduce));
                settled(barrier(&world, Channel::User))?;
                return settled(barrier(&world, Channel::Control));
            }
            let [first, second] = [world.clone(), world.clone()];
            let first = thread::spawn(move || drop(barrier(&first, Channel::Reduce)));
            first.join().expect("no panic");
            let second = thread::spawn(move || settled(barrier(&second, Channel::User)));
            settled(barrier(&world, Channel::Control))?;
            second.join().expect("no panic")
        });
        assert_eq!(outcomes, [Ok(()), Ok(())]);
    });
}
