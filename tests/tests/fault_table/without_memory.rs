//! Row 45: a rank without memory.

use std::sync::atomic::{AtomicUsize, Ordering};

use hsdp::memory::{self, Category};
use hsdp::{ByteCount, Error, Rank, World};
use hsdp_comm::CallError::OutOfMemory;
use hsdp_comm::{Error as CommError, FaultKind, Stage};
use hsdp_tests::support::models::unit;

use crate::children;
use crate::runner::Happened;
use crate::training::{At, CULPRIT, FAULTY, Go, Run, SURVIVORS, Training};

pub(crate) fn out() -> Happened {
    let run = Training::with_fault((unit(1), Stage::Gather), FaultKind::OutOfMemory).run();
    let happened = told_to_all(&run);
    let own = &run.fared(CULPRIT).told[0].0;
    let Error::Comm(CommError::Call(OutOfMemory { bytes, what, .. })) = own else {
        panic!("{own}")
    };
    assert!(*bytes > 0 && what.contains("unit 1"), "{own}");

    let refused = children::plays("without_memory");
    assert!(refused.told.contains("out of memory: cannot allocate "), "{}", refused.told);
    happened
}

/// An allocation that is refused, in a process of its own: budgets are of ranks of a process.
///
/// After a first step a rank has all the memory that it needs, so the step fails once for another
/// reason: then it has let go of it.
pub(crate) fn refused_by_the_allocator() -> Happened {
    let attempts = AtomicUsize::new(0);
    let poor = |world: &World, at, step| {
        if (world.rank().index(), step) != (CULPRIT, FAULTY) {
            return Ok(Go::On);
        }
        let attempt = match at {
            At::Start => attempts.fetch_add(1, Ordering::Relaxed) + 1,
            _ => attempts.load(Ordering::Relaxed),
        };
        let nothing = (attempt == 2).then_some(ByteCount(0));
        memory::set_budget(Rank::new(CULPRIT), Category::Full, nothing);
        match (at, attempt) {
            (At::Batch(0), 1) => Err(Error::Options { what: "a batch is broken".to_owned() }),
            _ => Ok(Go::On),
        }
    };
    let run = Training { user: &poor, ..Training::new() }.run();
    let own = &run.fared(CULPRIT).told[1].0;
    let Error::OutOfMemory { bytes, unit, .. } = own else { panic!("{own}") };
    assert!(*bytes > 0 && unit == "first", "{own}");
    told_to_all(&run)
}

/// The others get the culprit's error, and all ranks go on.
fn told_to_all(run: &Run) -> Happened {
    let (error, happened) = run.told(&SURVIVORS);
    let own = run.fared(CULPRIT).told.last().expect("it was told").0.to_string();
    assert_eq!(error.to_string(), format!("step {FAULTY} aborted by rank {CULPRIT}: {own}"));
    run.assert_no_trace();
    happened
}
