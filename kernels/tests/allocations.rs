//! The allocations of a process. Counters cover the whole process, so this file has one test.

use std::hint::black_box;

use hsdp_kernels::memory::{self, Category, CountingAllocator};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// The harness of the test allocates at the same time, but far smaller sizes.
#[test]
fn all_that_is_asked_for_counts_in_any_scope_and_none() {
    const MANY: usize = 10_000_000;
    let before = memory::allocations();
    let outside = black_box(vec![1_u8; MANY]);
    let _scope = memory::scope(Category::Full);
    let mut inside = black_box(vec![0_u8; MANY]);
    let seen = memory::allocations().since(before);
    assert!(seen.count >= 2);
    assert_eq!(seen.bytes.get() / MANY as u64, 2, "{seen:?}");

    inside.reserve_exact(2 * MANY);
    let grown = memory::allocations().since(before);
    assert_eq!(grown.bytes.get() / MANY as u64, 4, "{grown:?}");
    drop((outside, inside));
    let freed = memory::allocations().since(before);
    assert_eq!(freed.bytes.get() / MANY as u64, 4, "what is freed was allocated: {freed:?}");
}
