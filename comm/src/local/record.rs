//! What a rank shows to the others: where it is, and what it has moved.

use std::sync::Arc;

use crate::Descriptor;
use crate::ledger::Ledger;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The public state of one rank. Written by the rank, read by whoever has to name it in an error.
#[derive(Debug, Default)]
pub(crate) struct Record {
    /// Bytes and calls of this rank.
    pub(crate) ledger: Ledger,
    step: AtomicU64,
    epoch: AtomicU64,
    left: AtomicBool,
    last: Mutex<Option<Arc<Descriptor>>>,
}

impl Record {
    pub(crate) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    pub(crate) fn set_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Goes on to the epoch after `from`, unless another thread of the rank already did.
    pub(crate) fn advance_epoch(&self, from: u64) {
        let _ = self.epoch.compare_exchange(from, from + 1, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The operation that the rank issued last.
    pub(crate) fn last(&self) -> Option<Arc<Descriptor>> {
        self.last.lock().clone()
    }

    pub(crate) fn enter(&self, descriptor: &Arc<Descriptor>) {
        let previous = self.last.lock().replace(Arc::clone(descriptor));
        drop(previous);
    }

    pub(crate) fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// Marks the rank as gone; whether it was there until now.
    pub(crate) fn leave(&self) -> bool {
        !self.left.swap(true, Ordering::AcqRel)
    }
}
