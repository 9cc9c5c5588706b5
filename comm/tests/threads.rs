//! No thread is left behind. Alone in its file: it counts the threads of the process.
#![cfg(target_os = "linux")]

mod common;

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::{Channel, Pending, Reduction, Tag, Workers, World, WorldOptions};

use crate::common::outcomes;

/// Worker threads of this process.
fn workers() -> usize {
    let tasks = fs::read_dir("/proc/self/task").expect("the threads of this process");
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("hsdp-worker")).count()
}

/// Whether there are `count` workers, now or in a moment: a thread takes its name when it first runs, and is listed
/// for a moment after it has been joined.
fn workers_become(count: usize) -> bool {
    let started = Instant::now();
    while workers() != count && started.elapsed() < Duration::from_secs(60) {
        thread::yield_now();
    }
    workers() == count
}

#[test]
fn workers_start_with_the_first_work_and_end_with_the_world() {
    for round in 0..10 {
        let worlds =
            World::local(2, WorldOptions { workers: Workers::Count(3), ..WorldOptions::default() });
        assert!(workers_become(0), "round {round}: nothing to do yet");
        let issue = |world: &World| {
            world.world_group(Channel::User).all_reduce(
                Tag::default(),
                Reduction::Sum,
                vec![1_f32; 1 << 18],
            )
        };
        let pending: Vec<_> = worlds.iter().map(issue).collect();
        assert!(workers_become(3), "round {round}: the first work is there");
        drop(worlds);
        assert!(workers_become(0), "round {round}: joined with the last handle");
        for pending in pending {
            assert!(pending.expect("issued").is_complete(), "the workers finish what is queued");
        }
    }
    // The same when ranks panic.
    let ends = outcomes(3, WorldOptions::default(), |world| {
        let group = world.world_group(Channel::User);
        let sum = || {
            let values = vec![1_f32; 1 << 18];
            group.all_reduce(Tag::default(), Reduction::Sum, values).and_then(Pending::wait)
        };
        sum().expect("all are there");
        assert!(world.rank().index() > 0, "rank 0 fails");
        sum()
    });
    assert!(ends[0].is_err());
    assert!(workers_become(0));
}
