//! One use of a unit in the forward: the units that it read, and the units that its backward needs.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::Error;
use crate::unit::LiveUnit;

/// One call of [`Pass::unit`](crate::Pass::unit). It reads its own unit, and others through tied
/// names.
#[derive(Debug)]
pub(crate) struct UnitUsage {
    reads: Mutex<Vec<Arc<LiveUnit>>>,
    held: Mutex<Vec<Arc<LiveUnit>>>,
}

/// Whether a hook on the unit's input reports when the backward of this use is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputWatch {
    /// There is no hook, because no frozen parameter is read, or nothing before this use is
    /// differentiated. Units whose frozen parameters were read stay full until the whole backward
    /// is over.
    Off,
    /// There is a hook. Until it runs, units whose frozen parameters were read stay full.
    Input,
}

impl UnitUsage {
    /// Returns a use of `own`.
    pub(crate) fn of(own: &Arc<LiveUnit>) -> Arc<Self> {
        Arc::new(Self { reads: Mutex::new(vec![Arc::clone(own)]), held: Mutex::default() })
    }

    /// Records that this use reads a parameter of `unit`.
    pub(crate) fn reads(&self, unit: &Arc<LiveUnit>) {
        add(&mut self.reads.lock(), unit);
    }

    /// Records that this use reads a frozen parameter of `unit`. Holds the unit until
    /// [`release`](Self::release), which is never called if the input is not watched.
    pub(crate) fn reads_frozen(&self, unit: &Arc<LiveUnit>) {
        if add(&mut self.held.lock(), unit) {
            unit.hold();
        }
    }

    /// Reshards the units that this use read, at its end in the forward.
    pub(crate) fn reshard(&self) -> Result<(), Error> {
        self.reads.lock().iter().try_for_each(|unit| unit.reshard())
    }

    /// Gathers the units that this use read, before its backward.
    pub(crate) fn gather(&self) -> Result<(), Error> {
        self.reads.lock().iter().try_for_each(|unit| unit.gather_again())
    }

    /// Releases the units that this use holds, after its backward.
    pub(crate) fn release(&self) -> Result<(), Error> {
        self.held.lock().drain(..).try_for_each(|unit| unit.release())
    }
}

/// Adds `unit`, and returns whether it is new.
fn add(units: &mut Vec<Arc<LiveUnit>>, unit: &Arc<LiveUnit>) -> bool {
    let new = !units.iter().any(|known| Arc::ptr_eq(known, unit));
    if new {
        units.push(Arc::clone(unit));
    }
    new
}
