//! Peaks start anew. A program of its own, since this touches the counters of every rank.

use hsdp_kernels::memory::{self, Category, CountingAllocator};
use hsdp_sharding::{ByteCount, Rank};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

#[test]
fn a_peak_starts_anew_from_what_is_held() {
    let rank = Rank::new(1);
    memory::set_rank(rank);
    let _scope = memory::scope(Category::Full);
    let kept = vec![0_u8; 100];
    drop(vec![0_u8; 900]);
    assert_eq!(memory::usage(rank, Category::Full).peak, ByteCount(1000));
    memory::reset_peaks();
    assert_eq!(memory::usage(rank, Category::Full).peak, ByteCount(100));
    drop(vec![0_u8; 50]);
    assert_eq!(memory::usage(rank, Category::Full).peak, ByteCount(150));
    drop(kept);
}
