//! What a rank shows to the others: where it is, and what it has moved.

use std::sync::Arc;

use super::operation::Operation;
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
    /// The operations without which its threads do not go on; one for each thread that does not.
    blocked_on: Mutex<Vec<Arc<Operation>>>,
}

/// While it lives, a thread of the rank does not go on without an operation.
pub(super) struct Blocked<'a> {
    record: &'a Record,
    operation: &'a Arc<Operation>,
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

    /// Notes that a thread of the rank waits for `operation`, or does its work.
    pub(super) fn block_on<'a>(&'a self, operation: &'a Arc<Operation>) -> Blocked<'a> {
        self.blocked_on.lock().push(Arc::clone(operation));
        Blocked { record: self, operation }
    }

    /// The operations without which its threads do not go on; none if it is busy with something else, or hangs there.
    pub(super) fn blocked_on(&self) -> Vec<Arc<Operation>> {
        self.blocked_on.lock().clone()
    }
}

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        let mut blocked_on = self.record.blocked_on.lock();
        let own = blocked_on.iter().position(|it| Arc::ptr_eq(it, self.operation));
        // Never the last clone: the thread has one of its own.
        drop(own.map(|own| blocked_on.swap_remove(own)));
    }
}
