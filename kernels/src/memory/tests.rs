//! K-3 and K-4: these tests call the allocator directly. `tests/counting_allocator.rs` installs it.

use std::alloc::{GlobalAlloc, Layout};
use std::thread;

use hsdp_sharding::{ByteCount, Rank};

use super::{Category, CountingAllocator, MAX_RANKS, scope, set_rank, usage};

const COUNTING: CountingAllocator = CountingAllocator::new();

fn live(rank: usize, category: Category) -> u64 {
    usage(Rank::new(rank), category).live.0
}

/// Allocates, and writes every byte.
fn allocate(layout: Layout, byte: u8) -> *mut u8 {
    // SAFETY: K-3, the layouts of these tests are not empty.
    let block = unsafe { COUNTING.alloc(layout) };
    assert!(!block.is_null());
    assert_eq!(block.addr() % layout.align(), 0);
    // SAFETY: K-4, the block is this long.
    unsafe { block.write_bytes(byte, layout.size()) };
    block
}

/// Frees, after a check of the bytes.
fn free(block: *mut u8, layout: Layout, byte: u8) {
    // SAFETY: K-4, the block is this long and was written.
    let bytes = unsafe { std::slice::from_raw_parts(block, layout.size()) };
    assert!(bytes.iter().all(|found| *found == byte));
    // SAFETY: K-4, allocated with this layout, and freed once.
    unsafe { COUNTING.dealloc(block, layout) };
}

#[test]
fn every_size_and_alignment() {
    set_rank(Rank::new(900));
    let _scope = scope(Category::Full);
    for align in (0..=12).map(|power| 1 << power) {
        for size in [1, 2, 3, 15, 16, 17, 100, 5000] {
            let layout = Layout::from_size_align(size, align).unwrap();
            let block = allocate(layout, 0xa5);
            assert_eq!(live(900, Category::Full), size as u64);
            free(block, layout, 0xa5);
            assert_eq!(live(900, Category::Full), 0);
        }
    }
}

#[test]
fn a_block_keeps_its_tag_and_its_bytes_when_it_is_resized() {
    set_rank(Rank::new(901));
    for align in [1, 8, 16, 64, 4096] {
        let layout = Layout::from_size_align(40, align).unwrap();
        let shard = scope(Category::Shard);
        let block = allocate(layout, 7);
        drop(shard);
        let _elsewhere = scope(Category::Optimizer);
        // SAFETY: K-4, allocated with this layout; the new size is not zero.
        let block = unsafe { COUNTING.realloc(block, layout, 5000) };
        assert_eq!(block.addr() % align, 0);
        assert_eq!((live(901, Category::Shard), live(901, Category::Optimizer)), (5000, 0));
        let layout = Layout::from_size_align(5000, align).unwrap();
        // SAFETY: K-4, as above.
        let block = unsafe { COUNTING.realloc(block, layout, 20) };
        assert_eq!((live(901, Category::Shard), live(901, Category::Optimizer)), (20, 0));
        free(block, Layout::from_size_align(20, align).unwrap(), 7);
        assert_eq!(live(901, Category::Shard), 0);
    }
}

#[test]
fn zeroed_memory_is_zero() {
    set_rank(Rank::new(902));
    let _scope = scope(Category::Partial);
    let layout = Layout::from_size_align(3000, 32).unwrap();
    // SAFETY: K-3, the layout is not empty.
    let block = unsafe { COUNTING.alloc_zeroed(layout) };
    assert_eq!(live(902, Category::Partial), 3000);
    free(block, layout, 0);
}

#[test]
fn what_cannot_be_had_is_null_and_not_counted() {
    set_rank(Rank::new(903));
    let _scope = scope(Category::Shard);
    let greatest = Layout::from_size_align(isize::MAX as usize - 8, 8).unwrap();
    // SAFETY: K-3, the layout is not empty.
    assert!(unsafe { COUNTING.alloc(greatest) }.is_null());
    // SAFETY: K-3, the layout is not empty.
    assert!(unsafe { COUNTING.alloc_zeroed(greatest) }.is_null());
    let layout = Layout::from_size_align(16, 8).unwrap();
    let block = allocate(layout, 1);
    // SAFETY: K-4, allocated with this layout; the new size is not zero.
    assert!(unsafe { COUNTING.realloc(block, layout, isize::MAX as usize - 8) }.is_null());
    assert_eq!(live(903, Category::Shard), 16);
    free(block, layout, 1);
    assert_eq!(usage(Rank::new(903), Category::Shard).peak, ByteCount(16));
}

#[test]
fn a_block_may_be_freed_by_another_thread() {
    set_rank(Rank::new(904));
    let layout = Layout::from_size_align(64, 64).unwrap();
    let address = {
        let _scope = scope(Category::GradFull);
        allocate(layout, 3).expose_provenance()
    };
    assert_eq!(live(904, Category::GradFull), 64);
    thread::spawn(move || {
        set_rank(Rank::new(905));
        let _scope = scope(Category::Shard);
        free(std::ptr::with_exposed_provenance_mut(address), layout, 3);
    })
    .join()
    .unwrap();
    assert_eq!((live(904, Category::GradFull), live(905, Category::Shard)), (0, 0));
}

#[test]
fn scopes_nest_and_end() {
    set_rank(Rank::new(906));
    let layout = Layout::from_size_align(8, 8).unwrap();
    let outer = scope(Category::Full);
    let inner = scope(Category::Partial);
    let first = allocate(layout, 0);
    drop(inner);
    let second = allocate(layout, 0);
    let uncounted = scope(Category::Other);
    let third = allocate(layout, 0);
    drop(uncounted);
    drop(outer);
    let fourth = allocate(layout, 0);
    assert_eq!((live(906, Category::Full), live(906, Category::Partial)), (8, 8));
    assert_eq!(live(906, Category::Other), 0);
    for block in [first, second, third, fourth] {
        free(block, layout, 0);
    }
    assert_eq!((live(906, Category::Full), live(906, Category::Partial)), (0, 0));
}

#[test]
fn a_rank_beyond_the_table_has_no_memory() {
    assert_eq!(live(MAX_RANKS, Category::Shard), 0);
}

#[test]
fn the_memory_of_a_rank_beyond_the_table_is_not_counted() {
    for rank in [MAX_RANKS, u32::MAX as usize] {
        set_rank(Rank::new(rank));
        let counted = scope(Category::Shard);
        let layout = Layout::new::<u64>();
        let block = allocate(layout, 0);
        drop(counted);
        assert_eq!(live(rank, Category::Shard), 0);
        free(block, layout, 0);
    }
}
