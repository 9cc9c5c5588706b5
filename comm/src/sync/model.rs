//! Those of the models: every lock, atomic, sleep and start of a thread is a point at which the
//! model checker may go on with another thread. It runs one at a time, so atomics are sequentially
//! consistent here, whatever order they name.

use std::ops::{Deref, DerefMut};
use std::sync::{LazyLock, LockResult, PoisonError};
use std::time::Instant;

pub(crate) use shuttle::sync::atomic;
pub(crate) use shuttle::{hint, thread_local};

use shuttle::sync;

/// Threads that the model checker runs.
pub(crate) mod thread {
    use std::io;
    use std::num::NonZeroUsize;

    pub(crate) use shuttle::thread::{Builder, JoinHandle, current, yield_now};

    /// One core, so that the schedules of a model do not depend on the machine, and a thread that
    /// waits does not stay awake.
    pub(crate) fn available_parallelism() -> io::Result<NonZeroUsize> {
        Ok(NonZeroUsize::MIN)
    }
}

/// Time stands still: an alarm rings when the wait begins, if its period is 0, or never.
pub(crate) fn now() -> Instant {
    static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);
    *NOW
}

/// A lock that does not remember panics, as `parking_lot`'s.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    #[track_caller]
    pub(crate) fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { held: Some(held(self.0.lock())), of: self }
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(MutexGuard { held: Some(self.0.try_lock().ok()?), of: self })
    }

    pub(crate) fn into_inner(self) -> T {
        held(self.0.into_inner())
    }
}

fn held<T>(locked: LockResult<T>) -> T {
    locked.unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct MutexGuard<'a, T> {
    /// Lent to a [`Condvar`] while the thread sleeps.
    held: Option<sync::MutexGuard<'a, T>>,
    of: &'a Mutex<T>,
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.held.as_ref().expect("its thread is awake")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().expect("its thread is awake")
    }
}

/// A condition variable with the shape of `parking_lot`'s. A thread that waits until a moment never
/// sees it come, unless it has come before: a thread that is not woken sleeps for ever, and the
/// model checker says so.
#[derive(Debug, Default)]
pub(crate) struct Condvar(sync::Condvar);

/// Whether a wait ended because its moment has come.
pub(crate) struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    pub(crate) fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    #[track_caller]
    pub(crate) fn new() -> Self {
        Self(sync::Condvar::new())
    }

    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let lent = guard.held.take().expect("its thread is awake");
        guard.held = Some(held(self.0.wait(lent)));
    }

    pub(crate) fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        moment: Instant,
    ) -> WaitTimeoutResult {
        let over = moment <= now();
        if over {
            // Others may come in before it has the lock again.
            drop(guard.held.take());
            *guard = guard.of.lock();
        } else {
            self.wait(guard);
        }
        WaitTimeoutResult(over)
    }
}
