//! The lock and the atomics of this crate: those of `parking_lot` and std, and under `--cfg shuttle` those of a model checker.

#[cfg(not(shuttle))]
pub(crate) use parking_lot::Mutex;
#[cfg(shuttle)]
pub(crate) use shuttle::sync::atomic;
#[cfg(not(shuttle))]
pub(crate) use std::sync::atomic;

/// A lock that does not remember panics, as `parking_lot`'s.
#[cfg(shuttle)]
#[derive(Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

#[cfg(shuttle)]
impl<T> Mutex<T> {
    #[track_caller]
    pub(crate) fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> shuttle::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
