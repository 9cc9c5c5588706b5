//! Operations of so many blocks that threads claim several at a time, and what comes among them.

use std::panic::resume_unwind;
use std::sync::Arc;
// Not the model checker's: they only count what happened, and are no point at which another thread may go on.
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hsdp_comm::WorldError::{Aborted, WorkFailed};
use hsdp_comm::{AbortReason, Error, Reduced, World, WorldOptions};
use shuttle::thread;

use super::ends::impatient;
use super::work::reduce;
use super::{options, run, schedules, settled, user};

/// Elements of a gradient of which two members own five blocks each. The claims of these ten are of 3, 2, 2, 1, 1 and 1.
const LONG: usize = 2 * 5 * (8 << 10);

/// How many blocks these are.
const BLOCKS: usize = 10;

/// The reads that the members' gradients saw.
#[derive(Default)]
struct Seen {
    /// How often each was read: once a block.
    reads: [AtomicUsize; 2],
    /// Rank 0 has got the end of its operation.
    is_over: AtomicBool,
    /// How often rank 0's gradient was read after that.
    late: AtomicUsize,
}

impl Seen {
    /// A gradient is read; how often it was before.
    fn read(&self, rank: usize) -> usize {
        if rank == 0 && self.is_over.load(Ordering::Relaxed) {
            self.late.fetch_add(1, Ordering::Relaxed);
        }
        self.reads[rank].fetch_add(1, Ordering::Relaxed)
    }

    fn reads(&self) -> [usize; 2] {
        self.reads.each_ref().map(|reads| reads.load(Ordering::Relaxed))
    }
}

type Outcome = Result<Reduced, Error>;

/// Two members reduce ten blocks, and rank 1's gradient panics when it was read so many times.
///
/// Both wait if `waiting` is 2; or else rank 0 alone does.
fn reduce_all(
    options: WorldOptions,
    panics_after: usize,
    waiting: usize,
) -> (Vec<Option<Outcome>>, Arc<Seen>) {
    let worlds = World::local(2, options);
    let seen = Arc::new(Seen::default());
    let all = Arc::clone(&seen);
    let outcomes = run(&worlds, move |world| {
        let seen = Arc::clone(&all);
        let rank = world.rank().index();
        let read = move || {
            if seen.read(rank) == panics_after && rank == 1 {
                // The hook of panics would take this one for a model that failed.
                resume_unwind(Box::new("the tensor is gone"));
            }
        };
        let (pending, lent) = reduce(&user(&world), LONG, read);
        if rank >= waiting {
            drop(pending);
            return (None, lent);
        }
        let outcome = settled(pending);
        if rank == 0 {
            all.is_over.store(true, Ordering::Relaxed);
        }
        (Some(outcome), lent)
    });
    drop(worlds);
    let (outcomes, lent): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
    // Where the deadline is over at once, the world does not wait for a worker in a block.
    while lent.iter().any(|lent| lent.strong_count() > 0) {
        thread::yield_now();
    }
    (outcomes, seen)
}

/// The one end of all members that waited: none if they got their sums, or else the error.
#[track_caller]
fn one_end(outcomes: Vec<Option<Outcome>>) -> Option<Error> {
    let ends: Vec<_> =
        outcomes.into_iter().flatten().map(|outcome| outcome.map(|it| it.partial)).collect();
    assert!(ends.iter().all(|end| *end == ends[0]), "an operation has one end");
    match ends.into_iter().next().expect("rank 0 waits") {
        Ok(partial) => {
            assert!(partial.len() == LONG / 2 && partial.iter().all(|sum| *sum == 2.0));
            None
        }
        Err(end) => Some(end),
    }
}

#[test]
fn blocks_that_are_claimed_together_are_each_run_once() {
    for workers in [1, 2] {
        schedules(move || {
            let (outcomes, seen) = reduce_all(options(workers), usize::MAX, 2);
            assert_eq!(one_end(outcomes), None);
            assert_eq!(seen.reads(), [BLOCKS; 2]);
        });
    }
}

/// Rank 1's gradient panics at its first read, at its second, or at its last.
#[test]
fn a_panic_among_blocks_that_were_claimed_together() {
    for panics_after in [0, 1, BLOCKS - 1] {
        schedules(move || {
            let (outcomes, seen) = reduce_all(options(1), panics_after, 2);
            let end = one_end(outcomes).expect("rank 1 panics").to_string();
            assert!(end.starts_with("world aborted: rank 1, "), "{end}");
            assert!(end.ends_with("it panicked: the tensor is gone"), "{end}");
            let [of_0, of_1] = seen.reads();
            assert!(panics_after < of_1 && of_1 <= of_0 && of_0 <= BLOCKS, "{of_0}, {of_1}");
        });
    }
}

/// Rank 0 gets the end of an operation, which a panic or its alarm has caused, while the worker may be in a block, or about to
/// begin one; it begins no other. What the end was.
fn ends_while_a_worker_runs_a_claim(
    options: fn(usize) -> WorldOptions,
    panics_after: usize,
) -> Option<Error> {
    let (outcomes, seen) = reduce_all(options(1), panics_after, 1);
    let end = one_end(outcomes);
    let late = seen.late.load(Ordering::Relaxed);
    assert!(late <= usize::from(end.is_some()), "{late} blocks were begun after the end");
    end
}

#[test]
fn what_was_claimed_of_an_operation_that_panicked_is_not_run() {
    schedules(|| {
        let end = ends_while_a_worker_runs_a_claim(options, 1);
        assert!(end.is_some(), "rank 1 panics");
    });
}

#[test]
fn what_was_claimed_of_an_operation_that_missed_its_deadline_is_not_run() {
    schedules(|| {
        ends_while_a_worker_runs_a_claim(impatient, usize::MAX);
    });
}

#[test]
fn a_deadline_passes_while_a_claim_is_run() {
    schedules(|| {
        let (outcomes, seen) = reduce_all(impatient(1), usize::MAX, 2);
        let reads = seen.reads();
        match one_end(outcomes) {
            None => assert_eq!(reads, [BLOCKS; 2]),
            Some(Error::World(Aborted { reason, .. } | WorkFailed { reason, .. })) => {
                assert!(matches!(reason, AbortReason::Deadline { .. }), "{reason}");
                assert!(reads[0] == reads[1] && reads[0] <= BLOCKS, "{reads:?}");
            }
            Some(end) => panic!("{end}"),
        }
    });
}
