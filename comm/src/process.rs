//! The process of a world: a copy of it (a fork) has none of the world's other threads.
//!
//! Every call asks for it. To ask the system for the number of the process takes a tenth of the time of a small call, so where the
//! system calls back in each copy, the copies are counted instead. It does after `fork`; a copy that was made by the bare system call
//! is not seen.

use std::process;

/// A number that differs in a copy of the process: the copies between it and the process of the first call, or the number of the process if the
/// system does not call back.
#[cfg(all(unix, not(miri)))]
pub(crate) fn mark() -> u64 {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static COPIES: AtomicU64 = AtomicU64::new(0);
    static COUNTS: OnceLock<bool> = OnceLock::new();

    /// Called in a copy by its only thread, before the fork returns.
    extern "C" fn one_more() {
        COPIES.fetch_add(1, Ordering::Relaxed);
    }

    // SAFETY: CO-3, the function that is called in a copy does only what is allowed there.
    let begin = || unsafe { libc::pthread_atfork(None, None, Some(one_more)) } == 0;
    if *COUNTS.get_or_init(begin) { COPIES.load(Ordering::Relaxed) } else { process::id().into() }
}

#[cfg(not(all(unix, not(miri))))]
pub(crate) fn mark() -> u64 {
    process::id().into()
}
