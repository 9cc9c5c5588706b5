//! Operations go on without their owners, and give the same bits whoever does the work when.

use std::hint;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::{
    Channel, Error, Group, Pending, Reduction, Scaling, Tag, Workers, World, WorldOptions,
};
use hsdp_kernels::{Divisor, HostBuffer, Wire};
use hsdp_sharding::{DType, Param, Unit, UnitLayout};

use crate::common::{outcomes, results};

fn tag() -> Tag {
    Tag::default()
}

/// Waits for `pending` without waiting for it: somebody else must do the work.
fn becomes_complete<T>(pending: &Pending<T>) -> bool {
    let started = Instant::now();
    while !pending.is_complete() && started.elapsed() < Duration::from_secs(60) {
        thread::yield_now();
    }
    pending.is_complete()
}

#[test]
fn an_operation_completes_before_anybody_waits_for_it() {
    for len in [1, 1 << 20] {
        let worlds = World::local(4, WorldOptions::default());
        let groups: Vec<Group> =
            worlds.iter().map(|world| world.world_group(Channel::User)).collect();
        let issue = |group: &Group| {
            let pending =
                group.all_reduce(tag(), Reduction::Sum, vec![1_f32; len]).expect("issued");
            assert!(group.index() == 3 || !pending.is_complete(), "members are missing");
            pending
        };
        let pending: Vec<_> = groups.iter().map(issue).collect();
        assert!(pending.iter().all(becomes_complete));
        for pending in pending {
            assert_eq!(pending.wait(), Ok(vec![4.0; len]));
        }
    }
}

#[test]
fn without_workers_the_last_member_does_the_work_before_its_call_returns() {
    let options = WorldOptions { workers: Workers::Count(0), ..WorldOptions::default() };
    let worlds = World::local(3, options);
    let issue = |world: &World| {
        world.world_group(Channel::User).all_gather(tag(), vec![1_u64; 1 << 18]).expect("issued")
    };
    let pending: Vec<_> = worlds.iter().map(issue).collect();
    assert!(pending.iter().all(Pending::is_complete));
}

#[test]
fn pending_outlives_the_handles_of_its_world() {
    let worlds = World::local(2, WorldOptions::default());
    let issue = |world: World| {
        world.world_group(Channel::User).all_reduce(tag(), Reduction::Sum, vec![1_f32; 1 << 20])
    };
    // The first has left when the second arrives, but it had issued. The workers are joined with the second.
    let pending: Vec<_> = worlds.into_iter().map(issue).collect();
    for pending in pending {
        assert_eq!(pending.and_then(Pending::wait), Ok(vec![2.0; 1 << 20]));
    }
}

#[test]
fn dropping_a_pending_cancels_nothing() {
    let sums = outcomes(3, WorldOptions::default(), |world| {
        let group = world.world_group(Channel::User);
        for round in 0..50 {
            let pending = group.all_reduce(tag(), Reduction::Sum, vec![1_f32; 20_000])?;
            if (world.rank().index() + round).is_multiple_of(3) {
                drop(pending);
            } else {
                assert_eq!(pending.wait()?, vec![3.0; 20_000]);
            }
        }
        group.barrier(tag())?.wait()
    });
    assert!(sums.into_iter().all(|sum| sum == Ok(Ok(()))));
}

#[test]
fn members_may_wait_in_different_orders() {
    results(4, |world| {
        let group = world.world_group(Channel::User);
        let issue = |place: u32| {
            let values = vec![world.rank().get() + place; 30_000];
            Some(group.all_reduce(tag(), Reduction::Sum, values).expect("issued"))
        };
        let mut pending: Vec<_> = (0..12).map(issue).collect();
        for turn in 0..12_u32 {
            // A different permutation on each rank: 5 and 7 have no factor in common with 12.
            let stride = [1, 5, 7, 11][world.rank().index()];
            let place = (turn * stride + world.rank().get()) % 12;
            let pending = pending[place as usize].take().expect("each is waited for once");
            assert_eq!(pending.wait(), Ok(vec![6 + 4 * place; 30_000]));
        }
    });
}

/// A generator of its own for each rank, so that ranks go different ways.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

fn noise(rank: usize, round: usize, len: usize) -> Vec<f32> {
    let mut dice = Dice((rank * 1_000 + round + 1) as u64 * 0x9e37_79b9);
    (0..len)
        .map(|_| f32::from(u16::try_from(dice.roll(60_000)).expect("small")) / 977.0 - 30.0)
        .collect()
}

/// Sixty operations of all kinds, issued and waited for with delays and in orders that `seed` decides; their outputs.
fn wander(world: &World, seed: u64) -> Result<Vec<Vec<f32>>, Error> {
    let rank = world.rank().index();
    let mut dice = Dice(seed * 64 + rank as u64 + 1);
    let group = world.world_group(Channel::User);
    let mut outputs = vec![Vec::new(); 60];
    let mut pending = Vec::new();
    for round in 0..60 {
        pending.push((round, issue(&group, round)?));
        (0..dice.roll(3)).for_each(|_| thread::yield_now());
        (0..dice.roll(2_000)).for_each(|_| hint::spin_loop());
        // Wait for some of them, any of them.
        while pending.len() as u64 > dice.roll(9) {
            let chosen = usize::try_from(dice.roll(pending.len() as u64)).expect("small");
            let (round, chosen) = pending.swap_remove(chosen);
            outputs[round] = chosen.wait()?;
        }
    }
    for (round, pending) in pending {
        outputs[round] = pending.wait()?;
    }
    Ok(outputs)
}

fn issue(group: &Group, round: usize) -> Result<Pending<Vec<f32>>, Error> {
    let values = noise(group.index(), round, [3, 1_000, 40_000][round % 3] * group.size());
    let three = Divisor::new(3.0).expect("a divisor");
    match round % 4 {
        0 => group.all_reduce(tag(), Reduction::Sum, values),
        1 => group.all_gather(tag(), values),
        2 => group.reduce_scatter(tag(), Reduction::Avg, values),
        _ => group.all_reduce_scaled(
            tag(),
            values,
            Scaling { wire: Wire::BF16, pre: three, post: three },
        ),
    }
}

#[test]
fn results_do_not_depend_on_timing_or_on_who_does_the_work() {
    let run = |workers, seed| {
        let options = WorldOptions { workers, ..WorldOptions::default() };
        let outputs = outcomes(4, options, |world| wander(&world, seed));
        outputs.into_iter().map(|it| it.expect("no panic").expect("no error")).collect::<Vec<_>>()
    };
    let expected = run(Workers::Count(0), 1);
    for seed in 2..8 {
        let workers = if seed % 2 == 0 { Workers::Auto } else { Workers::Count(3) };
        assert!(run(workers, seed) == expected, "seed {seed}, {workers:?}");
    }
}

fn layout(size: usize, len: usize) -> Arc<UnitLayout> {
    let unit = Unit::new("unit").param(Param::new("weight", [len]));
    Arc::new(UnitLayout::new(&unit, size).expect("a layout"))
}

// CO-1: the work is taken apart, and what was lent is dropped, before anybody gets an output.
#[test]
fn a_shard_is_free_to_be_written_when_its_gather_is_complete() {
    results(3, |world| {
        let group = world.world_group(Channel::Gather);
        let layout = layout(3, 300_000);
        let mut shard = Arc::new(vec![world.rank().index() as f32; layout.shard_len()]);
        for round in 0..20 {
            let targets = vec![HostBuffer::zeros(DType::F32, 300_000).expect("real")];
            let pending =
                group.gather_unit(tag(), Arc::clone(&layout), Arc::clone(&shard), targets);
            let full = pending.and_then(Pending::wait).expect("gathered");
            let own = world.rank().index() * layout.shard_len();
            assert_eq!(full[0].values().slice(own..own + 1).to_f32(), [shard[0]]);
            let shard = Arc::get_mut(&mut shard).expect("nobody reads it any more");
            shard.fill(round as f32);
        }
    });
}
