//! Operations that are issued and not waited for, waited for late, or whose elements are lent meanwhile.

use std::sync::Arc;

use hsdp_comm::{Pending, Tag, World};
use hsdp_kernels::HostBuffer;
use hsdp_sharding::DType;

use super::work::layout;
use super::{
    LARGE, SMALL, all_schedules, ones, options, run, schedules, settled, sum_of_ones, user,
};

/// Rank 0 does not wait for its sum of `len` ones, and rank 1 gets it all the same.
fn drop_one(len: usize, workers: usize) {
    let worlds = World::local(2, options(workers));
    let sums = run(&worlds, move |world| {
        let pending = ones(&user(&world), len);
        if world.rank().index() == 0 {
            drop(pending);
            return None;
        }
        Some(settled(pending))
    });
    assert_eq!(sums, [None, Some(Ok(sum_of_ones(2, len)))]);
}

#[test]
fn a_member_that_does_not_wait_for_a_small_operation() {
    all_schedules(10_000, || drop_one(SMALL, 0));
}

#[test]
fn a_member_that_does_not_wait_for_what_workers_do() {
    schedules(|| drop_one(LARGE, 1));
}

#[test]
fn nobody_waits_and_the_worker_is_joined_all_the_same() {
    schedules(|| {
        let worlds = World::local(2, options(1));
        run(&worlds, |world| drop(ones(&user(&world), LARGE)));
    });
}

#[test]
fn what_is_complete_is_had_without_waiting() {
    schedules(|| {
        let worlds = World::local(2, options(0));
        let complete = run(&worlds, |world| {
            let pending = ones(&user(&world), SMALL).expect("issued");
            let was_complete = pending.is_complete();
            assert_eq!(pending.wait(), Ok(sum_of_ones(2, SMALL)));
            was_complete
        });
        assert!(complete.contains(&true), "the last member does the work before its call returns");
    });
}

// CO-1: the work is taken apart, and what was lent is dropped, before anybody gets an output.
#[test]
fn what_was_lent_is_free_when_its_operation_is_complete() {
    schedules(|| {
        let worlds = World::local(2, options(1));
        run(&worlds, |world| {
            let layout = layout(40_000);
            let mut shard = Arc::new(vec![1.0; layout.shard_len()]);
            let targets = vec![HostBuffer::zeros(DType::F32, 40_000).expect("real")];
            let pending =
                user(&world).gather_unit(Tag::default(), layout, Arc::clone(&shard), targets);
            pending.and_then(Pending::wait).expect("gathered");
            assert!(Arc::get_mut(&mut shard).is_some(), "nobody reads it any more");
        });
    });
}
