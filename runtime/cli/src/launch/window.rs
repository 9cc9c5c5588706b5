//! Limits the bytes of lines that a command has sent and the launcher has not written.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::frame::WINDOW;

/// Free part of [`WINDOW`].
#[derive(Debug)]
pub(super) struct Window {
    free: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Window {
    /// Creates a window that is entirely free.
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

    /// Returns room to the window.
    pub(super) fn give(&self, bytes: usize) {
        let mut free = self.lock();
        *free = free.map(|room| room.saturating_add(bytes));
        self.changed.notify_all();
    }

    /// Ends all waits. Room is no longer returned.
    pub(super) fn close(&self) {
        *self.lock() = None;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
