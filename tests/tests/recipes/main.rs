//! Optimizers, alone and beside each other, and averages of parameters, on meshes: against their
//! formulas in f64, the plan, and a run on one rank.

mod ema;
mod formulas;
mod golden;
mod meshes;
mod model;
mod planned;
mod refused;
mod saved;
mod shampoo;
mod together;

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use hsdp::memory::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Held for writing by the tests that measure memory, which is counted by rank.
static TURN: RwLock<()> = RwLock::new(());

fn alone() -> RwLockWriteGuard<'static, ()> {
    TURN.write().unwrap_or_else(PoisonError::into_inner)
}

fn beside_others() -> RwLockReadGuard<'static, ()> {
    TURN.read().unwrap_or_else(PoisonError::into_inner)
}
