//! Which process this is, and whether it is still the same: a copy of it (a fork) has none of the other threads.
//!
//! Every call asks that. To ask the system for the number of the process takes as long as a tenth of all else that a small call
//! does, so where the system calls back in each copy, the copies are counted instead. That is so after `fork`; who makes a copy by
//! the bare system call is not seen.

use std::process;

/// A process, at the moment when it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) id: u32,
    /// How many copies lay between this one and the one in which the count began; `None` where nobody counts.
    copies: Option<u64>,
}

impl Process {
    /// The one in which this is called.
    pub(crate) fn this() -> Self {
        Self { id: process::id(), copies: copies::count() }
    }

    /// Whether this is called in it, and not in a copy of it.
    pub(crate) fn is_this(self) -> bool {
        match self.copies {
            Some(_) => self.copies == copies::so_far(),
            None => self.id == process::id(),
        }
    }
}

#[cfg(all(unix, not(miri)))]
mod copies {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static COPIES: AtomicU64 = AtomicU64::new(0);

    /// Begins to count, unless that was done before; the count, if there is one.
    pub(super) fn count() -> Option<u64> {
        static COUNTS: OnceLock<bool> = OnceLock::new();
        // SAFETY: CO-3, what is to be called in a copy does what may be done there.
        let begin = || unsafe { libc::pthread_atfork(None, None, Some(one_more)) } == 0;
        if *COUNTS.get_or_init(begin) { so_far() } else { None }
    }

    pub(super) fn so_far() -> Option<u64> {
        Some(COPIES.load(Ordering::Relaxed))
    }

    /// Called in a copy by its only thread, before the fork returns.
    extern "C" fn one_more() {
        COPIES.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(not(all(unix, not(miri))))]
mod copies {
    pub(super) fn count() -> Option<u64> {
        None
    }

    pub(super) fn so_far() -> Option<u64> {
        None
    }
}
