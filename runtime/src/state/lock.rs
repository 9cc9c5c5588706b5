//! The lock of the engine's state. A thread holds it while it runs code of the caller: an
//! optimizer's update, a gradient that is read. If that code calls the engine again, it gets an
//! error that names both calls, and does not wait for itself.

use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// A lock that knows the thread that holds it.
#[derive(Debug)]
pub(crate) struct Lock<T> {
    value: Mutex<T>,
    /// The mark of the thread that holds the lock, or [`NO_THREAD`]. A thread compares it with its
    /// own mark only, and a thread always sees its own last write.
    holder: AtomicUsize,
    /// The operation for which the thread has taken the lock.
    operation: Mutex<&'static str>,
}

const NO_THREAD: usize = 0;

/// An operation in which no code of the caller runs.
const SHORT: &str = "a short call";

/// The value, until it is dropped.
#[derive(Debug)]
pub(crate) struct StateGuard<'a, T> {
    value: MutexGuard<'a, T>,
    holder: &'a AtomicUsize,
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: Mutex::new(value),
            holder: AtomicUsize::new(NO_THREAD),
            operation: Mutex::new(SHORT),
        }
    }

    /// Waits for the lock.
    ///
    /// # Panics
    /// If this thread holds it.
    pub(crate) fn lock(&self) -> StateGuard<'_, T> {
        self.enter(SHORT).expect("a model is not called from inside one of its own calls")
    }

    /// Waits for the lock, for an operation.
    ///
    /// # Errors
    /// The operation for which this thread holds it.
    pub(crate) fn enter(&self, operation: &'static str) -> Result<StateGuard<'_, T>, &'static str> {
        if self.is_held_here() {
            return Err(*self.operation.lock());
        }
        Ok(self.held(self.value.lock(), operation))
    }

    /// Returns the lock, if no thread holds it.
    pub(crate) fn try_lock(&self) -> Option<StateGuard<'_, T>> {
        self.value.try_lock().map(|value| self.held(value, SHORT))
    }

    /// Returns whether this thread holds the lock.
    pub(crate) fn is_held_here(&self) -> bool {
        self.holder.load(Ordering::Relaxed) == mark()
    }

    fn held<'a>(&'a self, value: MutexGuard<'a, T>, operation: &'static str) -> StateGuard<'a, T> {
        *self.operation.lock() = operation;
        self.holder.store(mark(), Ordering::Relaxed);
        StateGuard { value, holder: &self.holder }
    }
}

impl<T> Deref for StateGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for StateGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for StateGuard<'_, T> {
    fn drop(&mut self) {
        self.holder.store(NO_THREAD, Ordering::Relaxed);
    }
}

/// Returns a number that no other living thread has.
fn mark() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| ptr::from_ref(mark).addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_holds_the_lock_does_not_wait_for_itself() {
        let lock = Lock::new(7);
        let held = lock.enter("an update").expect("nothing holds it");
        assert_eq!(lock.enter("a loss").err(), Some("an update"));
        assert!(lock.is_held_here());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| (lock.is_held_here(), lock.try_lock().is_some()));
            assert_eq!(other.join().expect("no panic"), (false, false));
        });
        drop(held);
        assert_eq!(lock.enter("a loss").as_deref(), Ok(&7));
    }
}
