//! Work in the queue, of which threads claim blocks.

use std::ops::Deref;
use std::sync::Arc;

use super::running::Running;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// Work in the queue. Its memory serves one after the other.
#[derive(Debug)]
pub(super) struct Queued {
    /// There until the last one lets go.
    running: Option<Running>,
    next: AtomicUsize,
}

impl Queued {
    /// Work that nobody has claimed anything of; in the place of work that is over, if there is one.
    ///
    /// # Panics
    /// If somebody still holds that.
    pub(super) fn renew(over: Option<Arc<Self>>, running: Running) -> Arc<Self> {
        let new = Self { running: Some(running), next: AtomicUsize::new(0) };
        let Some(mut queued) = over else { return Arc::new(new) };
        *Arc::get_mut(&mut queued).expect("nobody holds work that is over") = new;
        queued
    }

    /// The work itself, for whoever lets go last.
    pub(super) fn take(&mut self) -> Running {
        self.running.take().expect("the last one lets go once")
    }

    /// The next block that nobody has claimed.
    ///
    /// `Relaxed`: a claim orders nothing. The work was published with the lock of the queue, and is taken back under it.
    pub(super) fn claim(&self) -> Option<usize> {
        let block = self.next.fetch_add(1, Ordering::Relaxed);
        (block < self.blocks()).then_some(block)
    }

    /// Leaves nothing to be claimed.
    pub(super) fn abandon(&self) {
        self.next.store(self.blocks(), Ordering::Relaxed);
    }
}

impl Deref for Queued {
    type Target = Running;

    fn deref(&self) -> &Running {
        self.running.as_ref().expect("whoever holds it keeps it there")
    }
}
