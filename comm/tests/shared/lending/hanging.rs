//! Code of users that hangs: deadlines end what waits for it, and name it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::{Channel, Pending, Reduction, Workers, World, WorldOptions};
use hsdp_kernels::{GradientValues, Values};
use hsdp_sharding::Rank;
use tracing::Level;

use super::{LARGE, Reading, layout, reduce, tag};
use crate::common::Said;

fn is_worker() -> bool {
    thread::current().name().is_some_and(|name| name.starts_with("hsdp-worker"))
}

/// Until `over`. Gives up, for all, after longer than the tests take.
fn hang_until(over: &AtomicBool) {
    let started = Instant::now();
    while !over.load(Ordering::SeqCst) && started.elapsed() < Duration::from_secs(20) {
        thread::yield_now();
    }
    over.store(true, Ordering::SeqCst);
}

fn linger(time: Duration) {
    let started = Instant::now();
    while started.elapsed() < time {
        thread::yield_now();
    }
}

#[test]
fn work_that_hangs_ends_at_the_deadline_and_names_whose_gradient_is_read() {
    let deadline = Duration::from_millis(150);
    let options = WorldOptions { deadline, workers: Workers::Count(1), ..WorldOptions::default() };
    let hanging = Arc::new(AtomicBool::new(false));
    let over = Arc::new(AtomicBool::new(false));
    let worlds = World::local(3, options);
    let layout = layout(3, LARGE);
    let issue = |world: &World| {
        let hanging = Arc::clone(&hanging);
        let over = Arc::clone(&over);
        let is_bad = world.rank().index() == 1;
        // Only the worker hangs: a rank that does cannot look at its clock.
        let read = move || {
            if is_bad && is_worker() {
                hanging.store(true, Ordering::SeqCst);
                hang_until(&over);
            }
        };
        let group = world.world_group(Channel::Reduce);
        reduce(&group, &layout, Arc::new(Reading(LARGE, read))).expect("issued")
    };
    let pending: Vec<_> = worlds.iter().map(issue).collect();
    while !hanging.load(Ordering::SeqCst) {
        thread::yield_now();
    }
    let ends: Vec<_> =
        pending.into_iter().map(|pending| pending.wait().expect_err("it hangs")).collect();
    over.store(true, Ordering::SeqCst);
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    let text = ends[0].to_string();
    assert!(text.starts_with("world aborted: rank 1, "), "{text}");
    assert!(text.ends_with("all of ranks [0, 1, 2] arrived, the work did not end"), "{text}");
}

#[test]
fn a_rank_that_waits_does_not_help_with_the_code_of_strangers() {
    let deadline = Duration::from_millis(150);
    let options = WorldOptions { deadline, workers: Workers::Count(1), ..WorldOptions::default() };
    let helped = Arc::new(AtomicBool::new(false));
    let over = Arc::new(AtomicBool::new(false));
    let worlds = World::local(3, options);
    let layout = layout(2, LARGE);
    // Ranks 0 and 1 reduce what hangs whoever reads it; the only worker does.
    let issue = |world: &World| {
        let helped = Arc::clone(&helped);
        let over = Arc::clone(&over);
        let read = move || {
            helped.fetch_or(!is_worker(), Ordering::SeqCst);
            hang_until(&over);
        };
        let group = world.group(&[0, 1].map(Rank::new), Channel::Reduce).expect("a group");
        reduce(&group, &layout, Arc::new(Reading(LARGE, read))).expect("issued")
    };
    let hanging: Vec<_> = worlds[..2].iter().map(issue).collect();
    // Rank 2 waits for rank 0 in another group: the deadline ends that, whatever is in the queue.
    let group = worlds[2].group(&[0, 2].map(Rank::new), Channel::User).expect("a group");
    let end = group.all_reduce(tag(), Reduction::Sum, vec![1_f32]).and_then(Pending::wait);
    let end = end.expect_err("rank 0 does not come").to_string();
    over.store(true, Ordering::SeqCst);
    assert!(end.starts_with("world aborted: rank 0, "), "{end}");
    assert!(!helped.load(Ordering::SeqCst), "only workers run the code of strangers");
    drop(hanging);
}

#[test]
fn a_worker_that_hangs_for_ever_does_not_hold_up_the_end_of_its_world() {
    let deadline = Duration::from_millis(100);
    let options = WorldOptions { deadline, workers: Workers::Count(1), ..WorldOptions::default() };
    let started = Instant::now();
    let worlds = World::local(2, options);
    let layout = layout(2, 100_000);
    let issue =
        |world: &World| reduce(&world.world_group(Channel::Reduce), &layout, Arc::new(Hangs));
    let pending: Vec<_> = worlds.iter().map(issue).collect();
    drop(worlds);
    drop(pending);
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// A gradient that nobody can read to its end.
#[derive(Debug)]
struct Hangs;

impl GradientValues for Hangs {
    fn len(&self) -> usize {
        100_000
    }

    fn read(&self, _: Range<usize>, _: &mut dyn FnMut(Values<'_>)) {
        loop {
            std::thread::park();
        }
    }
}

/// The time of a block that is no stop.
const BLOCK: Duration = Duration::from_secs(2);

/// Seconds of a stop that can only be that block: a busy machine may give the process no time for half a second, which is a stop.
const STOP: f64 = 1.5;

/// Returns whether a warning says that the process was stopped for as long as the block.
fn is_stop(line: &str) -> bool {
    let overdue = line.split("overdue=").nth(1).and_then(|rest| rest.split(' ').next());
    seconds(overdue.unwrap_or_default()) >= STOP
}

/// The number in `1.5s`; 0 of milliseconds.
fn seconds(time: &str) -> f64 {
    time.strip_suffix('s').and_then(|number| number.parse().ok()).unwrap_or(0.0)
}

/// A member that waits runs a block until long after the moment at which it meant to look at its clock again.
#[test]
fn a_block_that_takes_long_is_no_stop_of_the_process() {
    let options = WorldOptions { workers: Workers::Count(1), ..WorldOptions::default() };
    let worlds = World::local(2, options);
    let layout = layout(2, LARGE);
    let said = Said::of("overdue");
    let over = Arc::new(AtomicBool::new(false));
    let issue = |world: &World| {
        let over = Arc::clone(&over);
        let read = move || {
            match is_worker() {
                _ if over.load(Ordering::SeqCst) => {}
                // The worker goes on for longer than the member, which looks at its clock before the operation is settled.
                true => {
                    hang_until(&over);
                    linger(Duration::from_millis(200));
                }
                false => {
                    linger(BLOCK);
                    over.store(true, Ordering::SeqCst);
                }
            }
        };
        let group = world.world_group(Channel::Reduce);
        reduce(&group, &layout, Arc::new(Reading(LARGE, read))).expect("issued")
    };
    let mut pending: Vec<_> = worlds.iter().map(issue).collect();
    let first = pending.remove(0);
    tracing::subscriber::with_default(said.clone(), || first.wait().expect("reduced"));
    assert!(over.load(Ordering::SeqCst), "the member has run a block");
    let lines = said.lines();
    let stops = lines.iter().filter(|(level, line)| *level == Level::WARN && is_stop(line));
    assert_eq!(stops.count(), 0, "{lines:?}");
}
