//! The faults that are due at a call.

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
    moment: Moment,
    /// Its calls since `moment` began.
    calls: u64,
    left: bool,
}

/// Calls are counted from 0 in each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
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

    /// Counts a call, and takes the faults that are due at it, in the order in which they were given. A value that is
    /// not finite is due only where there is a gradient.
    pub(crate) fn due(&self, moment: Moment, tag: &Tag, has_gradient: bool) -> Vec<Fault> {
        let mut progress = self.progress.lock();
        if progress.moment != moment {
            (progress.moment, progress.calls) = (moment, 0);
        }
        let number = progress.calls;
        progress.calls += 1;
        let is_due = |fault: &mut Fault| {
            fault.step == moment.step && is_due(fault, (number, tag), has_gradient)
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
fn is_due(fault: &Fault, (number, tag): (u64, &Tag), has_gradient: bool) -> bool {
    let is_non_finite = matches!(fault.kind, FaultKind::NonFinite(_));
    let is_there = match fault.place {
        FaultPlace::Unit(unit) => tag.unit == Some(unit),
        FaultPlace::Stage(stage) => tag.stage == stage,
        FaultPlace::UnitStage(unit, stage) => tag.unit == Some(unit) && tag.stage == stage,
        FaultPlace::Call(call) => call == number || is_non_finite && call < number,
    };
    is_there && (has_gradient || !is_non_finite)
}
