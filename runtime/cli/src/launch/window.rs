//! The bytes of lines that may be under way.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::frame::WINDOW;

/// The part of [`WINDOW`] that is free.
#[derive(Debug)]
pub(super) struct Window {
    free: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Window {
    /// Returns a window without bytes under way.
    pub(super) fn new() -> Self {
        Self { free: Mutex::new(Some(WINDOW)), changed: Condvar::new() }
    }

    /// Waits until a line of `bytes` bytes fits, and takes its room. Returns `false` if the window
    /// is closed.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let mut free = self.lock();
        loop {
            match *free {
                None => return false,
                Some(room) if room >= bytes => {
                    *free = Some(room - bytes);
                    return true;
                }
                Some(_) => {
                    free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Gives room back.
    pub(super) fn give(&self, bytes: usize) {
        let mut free = self.lock();
        *free = free.map(|room| room.saturating_add(bytes));
        self.changed.notify_all();
    }

    /// Ends all waits: nobody gives room any longer.
    pub(super) fn close(&self) {
        *self.lock() = None;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
