//! The process of a world: a copy of it (a fork) has none of the world's other threads.
//!
//! Every call asks for it. To ask the system for the number of the process takes a tenth of the time of a small call, so where the
//! system calls back in each copy, the copies are counted instead. It does after `fork`; a copy that was made by the bare system call
//! is not seen.

use std::process;

/// A process, at the moment when it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) id: u32,
    /// The number of copies between this process and the one in which the count began; `None` where they are not counted.
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
            Some(_) => self.copies == copies::count(),
            None => self.id == process::id(),
        }
    }
}

#[cfg(all(unix, not(miri)))]
mod copies {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static COPIES: AtomicU64 = AtomicU64::new(0);

    /// The count of copies, which the first call begins; `None` if the system does not call back.
    pub(super) fn count() -> Option<u64> {
        static COUNTS: OnceLock<bool> = OnceLock::new();
        // SAFETY: CO-3, the function that is called in a copy does only what is allowed there.
        let begin = || unsafe { libc::pthread_atfork(None, None, Some(one_more)) } == 0;
        COUNTS.get_or_init(begin).then(|| COPIES.load(Ordering::Relaxed))
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
}
