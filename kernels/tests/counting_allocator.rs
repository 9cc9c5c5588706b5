//! The counting allocator, installed. Each test counts for ranks of its own, since all tests run in
//! one process at once. A compiler may leave out a block that nothing uses, so blocks pass through
//! `black_box`.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;

use half::bf16;
use hsdp_kernels::HostBuffer;
use hsdp_kernels::memory::{self, Category, CountingAllocator, Usage};
use hsdp_sharding::{ByteCount, DType, Rank};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

fn used(live: u64, peak: u64) -> Usage {
    Usage { live: ByteCount(live), peak: ByteCount(peak) }
}

#[test]
fn a_vector_that_grows_is_counted_by_its_capacity() {
    let rank = Rank::new(1);
    memory::set_rank(rank);
    let mut shard = {
        let _scope = memory::scope(Category::Shard);
        black_box(Vec::<f32>::with_capacity(100))
    };
    assert_eq!(memory::usage(rank, Category::Shard), used(400, 400));
    shard.resize(1000, 1.0);
    let bytes = 4 * shard.capacity() as u64;
    assert_eq!(memory::usage(rank, Category::Shard), used(bytes, bytes));
    shard.truncate(10);
    shard.shrink_to_fit();
    assert_eq!(memory::usage(rank, Category::Shard), used(40, bytes));
    drop(shard);
    assert_eq!(memory::usage(rank, Category::Shard), used(0, bytes));
}

#[test]
fn buffers_of_every_dtype() {
    let rank = Rank::new(2);
    memory::set_rank(rank);
    let _scope = memory::scope(Category::Full);
    for (dtype, bytes) in [(DType::F32, 4), (DType::F16, 2), (DType::BF16, 2)] {
        let buffer = HostBuffer::zeros(dtype, 1_000_003).unwrap();
        assert_eq!(buffer.bytes(), ByteCount(bytes * 1_000_003));
        assert_eq!(memory::usage(rank, Category::Full).live, buffer.bytes());
        assert!(buffer.values().to_f32().iter().all(|value| *value == 0.0));
    }
    assert_eq!(memory::usage(rank, Category::Full).live, ByteCount(0));
}

#[test]
fn a_peak_is_what_was_held_at_once() {
    let rank = Rank::new(3);
    memory::set_rank(rank);
    let _scope = memory::scope(Category::Full);
    let first = black_box(vec![0_u8; 1000]);
    let second = black_box(vec![0_u8; 500]);
    drop(first);
    let third = black_box(vec![0_u8; 700]);
    assert_eq!(memory::usage(rank, Category::Full), used(1200, 1500));
    drop((second, third));
    assert_eq!(memory::usage(rank, Category::Full), used(0, 1500));
}

#[test]
fn blocks_that_no_allocation_backs_cost_nothing() {
    let rank = Rank::new(4);
    memory::set_rank(rank);
    let _scope = memory::scope(Category::Shard);
    let empty: Vec<bf16> = Vec::with_capacity(0);
    let units = vec![(); 1000];
    assert_eq!(memory::usage(rank, Category::Shard), used(0, 0));
    drop((empty, units));
}

#[repr(align(4096))]
struct Page([u8; 4096]);

#[test]
fn great_alignments_are_kept() {
    let rank = Rank::new(5);
    memory::set_rank(rank);
    let _scope = memory::scope(Category::Partial);
    let mut pages = black_box(vec![Page([7; 4096])]);
    for _ in 0..20 {
        pages.push(Page([7; 4096]));
        assert_eq!(pages.as_ptr().addr() % 4096, 0);
    }
    assert_eq!(memory::usage(rank, Category::Partial).live.0, 4096 * pages.capacity() as u64);
    assert!(pages.iter().all(|page| page.0[4095] == 7));
}

#[test]
fn threads_hand_their_blocks_to_one_another() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 200;
    let barrier = Barrier::new(THREADS);
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| std::sync::mpsc::channel::<Vec<Vec<u8>>>()).unzip();
    thread::scope(|scope| {
        for (index, receiver) in receivers.into_iter().enumerate() {
            let next = senders[(index + 1) % THREADS].clone();
            let barrier = &barrier;
            scope.spawn(move || {
                // For each of two ranks, two threads allocate and the other two free.
                memory::set_rank(Rank::new(20 + index % 2));
                let mut held = Vec::with_capacity(ROUNDS);
                for round in 0..ROUNDS {
                    let _scope = memory::scope(Category::GradFull);
                    held.push(vec![0_u8; 1 + (round * 37) % 4000]);
                }
                next.send(held).unwrap();
                barrier.wait();
                drop(receiver.recv().unwrap());
            });
        }
    });
    let bytes: usize = (0..ROUNDS).map(|round| 1 + (round * 37) % 4000).sum();
    for rank in [20, 21] {
        let usage = memory::usage(Rank::new(rank), Category::GradFull);
        assert_eq!(usage, used(0, 2 * bytes as u64), "rank {rank}: all was held at the barrier");
    }
}

#[test]
fn a_scope_counts_this_thread_alone() {
    let rank = Rank::new(6);
    memory::set_rank(rank);
    let _scope = memory::scope(Category::Optimizer);
    let elsewhere = thread::spawn(|| black_box(vec![0_u8; 10_000]));
    let block = elsewhere.join().unwrap();
    // The allocations of the spawn are counted too. All but a few bytes, less than the block, are
    // freed again.
    assert!(memory::usage(rank, Category::Optimizer).live < ByteCount(10_000));
    drop(block);
}

#[test]
fn what_was_counted_before_a_scope_ended_is_freed_after_it() {
    let rank = Rank::new(7);
    memory::set_rank(rank);
    let outside = black_box(vec![0_u8; 64]);
    let scope = memory::scope(Category::Shard);
    let inside = black_box(vec![0_u8; 32]);
    drop(outside); // not counted, so not taken off
    assert_eq!(memory::usage(rank, Category::Shard), used(32, 32));
    drop(scope);
    drop(inside);
    assert_eq!(memory::usage(rank, Category::Shard), used(0, 32));
}

#[test]
fn a_budget_is_kept_and_what_does_not_fit_is_an_error() {
    let rank = Rank::new(7);
    memory::set_rank(rank);
    memory::set_budget(rank, Category::Full, Some(ByteCount(5000)));
    let _scope = memory::scope(Category::Full);
    let first = HostBuffer::zeros(DType::F32, 1000).expect("it fits");
    let refused =
        HostBuffer::zeros(DType::F32, 1000).expect_err("it does not fit beside the first");
    assert_eq!(refused.to_string(), "out of memory: cannot allocate 4000 bytes");
    assert_eq!(memory::usage(rank, Category::Full).live, ByteCount(4000));
    let mut block = black_box(vec![0_u8; 900]);
    memory::set_budget(rank, Category::Full, Some(ByteCount(0)));
    block.truncate(100);
    block.shrink_to_fit(); // takes nothing, though there is less room than is taken
    assert_eq!(memory::usage(rank, Category::Full).live, ByteCount(4100));
    drop(block);
    memory::set_budget(rank, Category::Full, Some(ByteCount(5000)));
    drop(first);
    HostBuffer::zeros(DType::F32, 1000).expect("it fits again");
    memory::set_budget(rank, Category::Full, None);
    HostBuffer::zeros(DType::F32, 100_000).expect("there is no budget any more");
}
