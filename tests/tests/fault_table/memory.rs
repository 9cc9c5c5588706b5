//! Row 45: a rank without memory.

use std::sync::atomic::{AtomicBool, Ordering};

use hsdp::memory::{self, Category};
use hsdp::{Accumulation, ByteCount, Error, ModelOptions, Rank, World};
use hsdp_comm::{Error as CommError, FaultKind, Stage};
use hsdp_tests::support::models::unit;

use crate::children;
use crate::runner::Happened;
use crate::training::{At, CULPRIT, FAULTY, Go, Run, SURVIVORS, Training};

pub(crate) fn out() -> Happened {
    let run = Training::with_fault((unit(1), Stage::Gather), FaultKind::OutOfMemory).run();
    let happened = told_to_all(&run, &Training::new().run());
    let own = &run.fared(CULPRIT).told[0].0;
    let Error::Comm(CommError::OutOfMemory { bytes, what, .. }) = own else { panic!("{own}") };
    assert!(*bytes > 0 && what.contains("unit 1"), "{own}");

    let refused = children::plays("without_memory");
    assert!(refused.told.contains("out of memory: no "), "{}", refused.told);
    happened
}

/// An allocation that is refused, in a process of its own: budgets are of ranks of a process. Of the mode that needs new memory in
/// each step: what the others need they have since the first.
pub(crate) fn refused_by_the_allocator() -> Happened {
    let before = AtomicBool::new(true);
    let poor = |world: &World, at, step| {
        if (world.rank().index(), at, step) == (CULPRIT, At::Start, FAULTY) {
            let nothing = before.swap(false, Ordering::Relaxed).then_some(ByteCount(0));
            memory::set_budget(Rank::new(CULPRIT), Category::GradFull, nothing);
        }
        Ok(Go::On)
    };
    let new = Training::new();
    let model = ModelOptions { accumulation: Accumulation::Local, ..new.model.clone() };
    let undisturbed = Training { model: model.clone(), ..Training::new() }.run();
    let run = Training { user: &poor, model, ..new }.run();
    let own = &run.fared(CULPRIT).told[0].0;
    let Error::OutOfMemory { bytes, unit, .. } = own else { panic!("{own}") };
    assert!(*bytes > 0 && unit == "third", "{own}");
    told_to_all(&run, &undisturbed)
}

/// The others are told what the culprit was told, and all go on, as in a run that nothing disturbs.
fn told_to_all(run: &Run, undisturbed: &Run) -> Happened {
    let (error, happened) = run.told(&SURVIVORS);
    let own = run.fared(CULPRIT).told[0].0.to_string();
    assert_eq!(error.to_string(), format!("step {FAULTY} aborted by rank {CULPRIT}: {own}"));
    run.assert_same_as(undisturbed);
    happened
}
