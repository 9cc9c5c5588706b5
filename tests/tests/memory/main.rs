//! Memory: that which a plan says, and allocations that fail.
//!
//! Counters and budgets are per rank and process, so these tests run one at a time.

mod out_of_memory;
mod planned_memory;

use std::sync::{Mutex, MutexGuard, PoisonError};

use hsdp::memory::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Held by the test that is running.
static TURN: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
