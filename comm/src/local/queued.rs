//! Work in the queue, of which threads claim blocks.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::running::Running;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// How many claims of like length each thread would come to, if all that is left were cut for them.
const CLAIMS_OF_A_THREAD: usize = 4;

/// Work in the queue. Its memory serves one after the other.
#[derive(Debug)]
pub(super) struct Queued {
    /// There until the last one lets go.
    running: Option<Running>,
    next: AtomicUsize,
    /// Of what is left, a claim takes one of so many parts.
    parts: usize,
}

impl Queued {
    /// Work that nobody has claimed anything of, for so many threads; in the place of work that is over, if there is one.
    ///
    /// # Panics
    /// If somebody still holds that.
    pub(super) fn renew(over: Option<Arc<Self>>, running: Running, threads: usize) -> Arc<Self> {
        let (next, parts) = (AtomicUsize::new(0), CLAIMS_OF_A_THREAD * threads);
        let new = Self { running: Some(running), next, parts };
        let Some(mut queued) = over else { return Arc::new(new) };
        *Arc::get_mut(&mut queued).expect("nobody holds work that is over") = new;
        queued
    }

    /// The work itself, for whoever lets go last.
    pub(super) fn take(&mut self) -> Running {
        self.running.take().expect("the last one lets go once")
    }

    /// The next blocks that nobody has claimed: many neighbours first, and fewer towards the end.
    ///
    /// Memory is fetched ahead of a thread that goes on where it was; one that gets each second block is always at a new place.
    /// And few blocks at the end keep all threads busy to it ("guided self-scheduling", Polychronopoulos and Kuck 1987).
    ///
    /// `Relaxed`: a claim orders nothing. The work was published with the lock of the queue, and is taken back under it.
    pub(super) fn claim(&self) -> Option<Range<usize>> {
        let end = |first: usize| {
            let left = self.blocks().checked_sub(first).filter(|left| *left > 0)?;
            Some(first + left.div_ceil(self.parts))
        };
        let first = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end).ok()?;
        Some(first..end(first)?)
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
