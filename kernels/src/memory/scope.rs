//! The rank and the category for which a thread allocates at the moment.

use std::cell::Cell;
use std::marker::PhantomData;

use hsdp_sharding::Rank;

use super::tally::{BlockTag, Category, DeviceCharge};

// The initial values are constant and nothing is dropped: the allocator reads these, so they must
// never allocate, and must work before a thread's first line and after its last.
thread_local! {
    static RANK: Cell<usize> = const { Cell::new(0) };
    static TAG: Cell<BlockTag> = const { Cell::new(BlockTag::NONE) };
}

/// A guard: while it lives, the allocations of this thread belong to a category. It cannot be sent
/// to another thread.
#[must_use = "a scope counts allocations only while it lives"]
#[derive(Debug)]
pub struct Scope {
    outer: BlockTag,
    stays_on_its_thread: PhantomData<*const ()>,
}

/// Counts the allocations of this thread in `category`, until the returned scope is dropped. Scopes
/// nest.
///
/// The rank is the one that this thread last passed to [`set_rank`] before this call.
pub fn scope(category: Category) -> Scope {
    enter(BlockTag::new(RANK.get(), category))
}

/// Sets the rank for which this thread's scopes count from now on. Scopes that are open keep their
/// rank. A new thread has rank 0. The memory of ranks from [`MAX_RANKS`](super::MAX_RANKS) on is
/// not counted.
pub fn set_rank(rank: Rank) {
    RANK.set(rank.index());
}

/// Counts `bytes` on a device for this thread's rank and category.
pub(crate) fn charge_on_device(bytes: usize) -> DeviceCharge {
    DeviceCharge::new(TAG.get(), bytes)
}

/// The tag of this thread's next allocation.
pub(super) fn current() -> BlockTag {
    TAG.get()
}

fn enter(tag: BlockTag) -> Scope {
    Scope { outer: TAG.replace(tag), stays_on_its_thread: PhantomData }
}

impl Drop for Scope {
    fn drop(&mut self) {
        TAG.set(self.outer);
    }
}
