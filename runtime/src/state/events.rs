//! The order in which operations were issued and waited for, for tests and for inspection.

use hsdp_sharding::{Phase, UnitId};
use parking_lot::Mutex;

/// Something that the engine did, in the order in which it did it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A gather was issued.
    Gather {
        /// The unit.
        unit: UnitId,
        /// The microbatch.
        microbatch: usize,
        /// The pass for which it was gathered.
        phase: Phase,
    },
    /// A gathered unit was handed out.
    Unshard {
        /// The unit.
        unit: UnitId,
        /// The microbatch.
        microbatch: usize,
        /// The pass for which it was gathered.
        phase: Phase,
    },
    /// A reduce-scatter was issued.
    ReduceScatter {
        /// The unit.
        unit: UnitId,
        /// The microbatch.
        microbatch: usize,
    },
    /// An all-reduce was issued.
    AllReduce {
        /// The unit.
        unit: UnitId,
        /// The microbatch, or the last one where `finish` issued the all-reduce.
        microbatch: usize,
    },
    /// A reduce-scatter of sums over the replicas was issued.
    ScatterSums {
        /// The unit.
        unit: UnitId,
        /// The microbatch, or the last one where `finish` issued it.
        microbatch: usize,
    },
    /// A gather of updated slices over the replicas was issued.
    GatherSlices {
        /// The unit.
        unit: UnitId,
    },
}

/// A recording of events, from [`record`](Self::record) to [`take`](Self::take).
///
/// Its lock is the innermost: it is held for a push, or to take the recording, and nothing is
/// locked meanwhile.
#[derive(Debug, Default)]
pub(crate) struct EventLog(Mutex<Option<Vec<Event>>>);

impl EventLog {
    pub(crate) fn record(&self) {
        *self.0.lock() = Some(Vec::new());
    }

    pub(crate) fn take(&self) -> Vec<Event> {
        self.0.lock().take().unwrap_or_default()
    }

    pub(crate) fn push(&self, event: Event) {
        if let Some(events) = &mut *self.0.lock() {
            events.push(event);
        }
    }
}
