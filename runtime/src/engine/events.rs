//! The order in which things were issued and waited for, for tests and for whoever wants to look.

use hsdp_sharding::{Phase, UnitId};
use parking_lot::Mutex;

/// Something that the engine did, in the order in which it did it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A gather was issued.
    Gather {
        /// Of this unit.
        unit: UnitId,
        /// In this microbatch.
        microbatch: usize,
        /// For this pass.
        phase: Phase,
    },
    /// A gathered unit was handed out.
    Unshard {
        /// This unit.
        unit: UnitId,
        /// In this microbatch.
        microbatch: usize,
        /// For this pass.
        phase: Phase,
    },
    /// A reduce-scatter was issued.
    ReduceScatter {
        /// Of this unit.
        unit: UnitId,
        /// In this microbatch.
        microbatch: usize,
    },
    /// An all-reduce was issued.
    AllReduce {
        /// Of this unit.
        unit: UnitId,
        /// In this microbatch, or the last one where it was issued by `finish`.
        microbatch: usize,
    },
}

/// A recording of events, kept while somebody wants it.
///
/// Its lock is the innermost: it is held for a push, or to take the recording, and nothing is locked meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Option<Vec<Event>>>);

impl Events {
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
