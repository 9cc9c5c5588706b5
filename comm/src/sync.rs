//! The locks and atomics of this crate, behind one name: a model checker brings its own.

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
pub(crate) use std::sync::atomic;
