//! What a program runs on.

use std::time::Instant;

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
pub(crate) use std::sync::atomic;
pub(crate) use std::{hint, thread, thread_local};

/// The moment from which waits are measured.
#[inline]
pub(crate) fn now() -> Instant {
    Instant::now()
}
