//! Operations that wait for each other on a device, as those of a collective do. `CUDA.md`, "Operations that wait for each other".

use std::time::Duration;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Written while such operations are issued, by one thread for all devices of the process.
static ISSUED: RwLock<()> = RwLock::new(());

/// Held from before the first of operations that wait for each other until all of them are issued. No other thread issues such operations
/// meanwhile, or makes a call that is [`Apart`] from them.
#[derive(Debug)]
pub struct Whole {
    _guard: RwLockWriteGuard<'static, ()>,
}

impl Whole {
    /// Waits for its turn for `limit` at most; `None` if it has not come.
    #[must_use]
    pub fn begin(limit: Duration) -> Option<Self> {
        ISSUED.try_write_for(limit).map(|guard| Self { _guard: guard })
    }
}

/// While this lives, no operations that wait for each other are partly issued. A call that may wait until a device is idle is made
/// meanwhile, as one that takes or frees memory: between two such operations, the first would wait for the second, and the second for the call.
#[derive(Debug)]
pub struct Apart {
    _guard: RwLockReadGuard<'static, ()>,
}

impl Apart {
    /// Waits until none are partly issued, but not for threads that wait for their turn. An abort must pass them: another call may wait for the operation
    /// that the abort ends, and they wait for that call.
    #[must_use]
    pub fn begin() -> Self {
        Self { _guard: ISSUED.read_recursive() }
    }
}
