//! The faults that are due at a call.

use std::sync::Arc;

use hsdp_kernels::GradientValues;

use super::{Fault, FaultKind, FaultPlace};
use crate::Tag;
use crate::sync::Mutex;

/// The faults of one rank. Where there are none, all that a call pays for them is a look at a flag.
#[derive(Debug, Default)]
pub(crate) struct Injector {
    has_faults: bool,
    progress: Mutex<Progress>,
}

/// The progress of a rank.
#[derive(Debug, Default)]
struct Progress {
    /// The faults that have not fired.
    armed: Vec<Fault>,
    /// The step and the epoch of its last call.
    step: (u64, u64),
    /// Its calls in that step, and in no other epoch.
    calls: u64,
    left: bool,
}

impl Injector {
    pub(crate) fn new(faults: impl Iterator<Item = Fault>) -> Self {
        let armed: Vec<Fault> = faults.collect();
        let has_faults = !armed.is_empty();
        Self { has_faults, progress: Mutex::new(Progress { armed, ..Progress::default() }) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.has_faults
    }

    /// Counts a call in a step of an epoch, and takes the faults that are due at it, in the order in which they were given. A value that is
    /// not finite is due only where a gradient has elements.
    pub(crate) fn due(
        &self,
        step: (u64, u64),
        tag: &Tag,
        gradients: &[Option<Arc<dyn GradientValues>>],
    ) -> Vec<Fault> {
        let has_gradient = gradients.iter().flatten().any(|it| !it.is_empty());
        let mut progress = self.progress.lock();
        if progress.step != step {
            (progress.step, progress.calls) = (step, 0);
        }
        let number = progress.calls;
        progress.calls += 1;
        let is_due = |fault: &mut Fault| {
            let can_be = has_gradient || !matches!(fault.kind, FaultKind::NonFinite(_));
            can_be && fault.step == step.0 && is_at(fault, (number, tag))
        };
        progress.armed.extract_if(.., is_due).collect()
    }

    /// The faults that have not fired.
    pub(crate) fn armed(&self) -> Vec<Fault> {
        self.progress.lock().armed.clone()
    }

    /// From now on the rank is gone.
    pub(crate) fn leave(&self) {
        self.progress.lock().left = true;
    }

    pub(crate) fn has_left(&self) -> bool {
        self.progress.lock().left
    }
}

/// Whether a fault is at the `number`-th call of a step. A value that is not finite waits for a gradient, from its call on.
fn is_at(fault: &Fault, (number, tag): (u64, &Tag)) -> bool {
    let is_non_finite = matches!(fault.kind, FaultKind::NonFinite(_));
    match fault.place {
        FaultPlace::Unit(unit) => tag.unit == Some(unit),
        FaultPlace::Stage(stage) => tag.stage == stage,
        FaultPlace::UnitStage(unit, stage) => tag.unit == Some(unit) && tag.stage == stage,
        FaultPlace::Call(call) => call == number || is_non_finite && call < number,
    }
}
