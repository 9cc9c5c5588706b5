//! Which faults are due at a call.

use super::{Fault, FaultKind, FaultPlace};
use crate::Tag;
use crate::sync::Mutex;

/// The faults of one rank. Where there are none, all that a call pays for them is a look at the empty list.
#[derive(Debug, Default)]
pub(crate) struct Injector {
    faults: Box<[Fault]>,
    progress: Mutex<Progress>,
}

/// How far a rank has come.
#[derive(Debug, Default)]
struct Progress {
    /// By fault: whether it has fired.
    fired: Box<[bool]>,
    moment: Moment,
    /// Its calls since `moment` began.
    calls: u64,
    left: bool,
}

/// What calls are counted from 0 in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
}

impl Injector {
    pub(crate) fn new(faults: impl IntoIterator<Item = Fault>) -> Self {
        let faults: Box<[Fault]> = faults.into_iter().collect();
        let fired = faults.iter().map(|_| false).collect();
        Self { faults, progress: Mutex::new(Progress { fired, ..Progress::default() }) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.faults.is_empty()
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
        let mut due = Vec::new();
        for (fault, fired) in self.faults.iter().zip(&mut progress.fired) {
            if !*fired && fault.step == moment.step && is_due(fault, (number, tag), has_gradient) {
                *fired = true;
                due.push(*fault);
            }
        }
        due
    }

    /// Those that have not fired.
    pub(crate) fn armed(&self) -> Vec<Fault> {
        let progress = self.progress.lock();
        let armed = self.faults.iter().zip(&progress.fired).filter(|(_, fired)| !**fired);
        armed.map(|(fault, _)| *fault).collect()
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
    match (fault.kind, fault.place) {
        (FaultKind::NonFinite(_), _) if !has_gradient => false,
        (FaultKind::NonFinite(_), FaultPlace::Call(call)) => call <= number,
        (_, place) => place.is_at(number, tag),
    }
}
