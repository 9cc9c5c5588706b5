//! Peaks start anew. A program of its own, since this touches the counters of every rank.

use std::hint::black_box;

use hsdp_kernels::memory::{self, Category, CountingAllocator};
use hsdp_sharding::{ByteCount, Rank};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Holds a block that is allocated, never touched and freed in sight of the compiler (K-4). The
/// compiler must not leave it out, since its address is used.
fn hold_for_a_moment(bytes: usize) {
    let block = vec![0_u8; bytes];
    let address = block.as_ptr().addr();
    drop(block);
    black_box(address);
}

#[test]
fn a_peak_starts_anew_from_what_is_held() {
    let rank = Rank::new(1);
    memory::set_rank(rank);
    let _scope = memory::scope(Category::Full);
    let kept = black_box(vec![0_u8; 100]);
    hold_for_a_moment(900);
    assert_eq!(memory::usage(rank, Category::Full).peak, ByteCount(1000));
    memory::reset_peaks();
    assert_eq!(memory::usage(rank, Category::Full).peak, ByteCount(100));
    hold_for_a_moment(50);
    assert_eq!(memory::usage(rank, Category::Full).peak, ByteCount(150));
    drop(kept);
}
