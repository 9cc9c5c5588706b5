//! The locks, atomics, threads and the clock of this crate, behind one name. They are those of
//! `parking_lot` and std, and under `--cfg shuttle` those of a model checker.
//! `comm/tests/models/README.md`.

#[cfg(shuttle)]
mod model;

#[cfg(shuttle)]
pub(crate) use self::model::*;
#[cfg(not(shuttle))]
pub(crate) use self::plain::*;

/// The primitives of programs, which no model checker drives.
#[cfg(not(shuttle))]
mod plain {
    use std::time::Instant;

    pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::sync::atomic;
    pub(crate) use std::{hint, thread, thread_local};

    /// The moment from which waits are measured.
    #[inline]
    pub(crate) fn now() -> Instant {
        Instant::now()
    }
}
