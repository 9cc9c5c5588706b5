//! Device buffers: allocation, reuse through the pool, copies, and refusals.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hsdp_kernels::cuda::{DeviceBuffer, Stream};
use hsdp_kernels::{Divisor, Fold, Values};
use hsdp_sharding::DType;

use super::numbers::ordinary;
use super::{PATIENCE, assert_same, device, download, stream, upload};

/// Held by tests of the pool: an allocation that runs out of memory empties the pool for all.
static POOL: Mutex<()> = Mutex::new(());

/// The pool, for one test alone.
pub(super) fn pool() -> MutexGuard<'static, ()> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Rounds of work on several streams, in which every buffer is dropped while the device still uses
/// it.
fn round(streams: &[Stream; 3], seed: u64, len: usize) {
    let values = ordinary(seed, len);
    let source = upload(&streams[0], Values::F32(&values));
    let mut wire = DeviceBuffer::new(&device(), DType::BF16, len, "a test").expect("memory");
    streams[1].narrow(&mut wire, &source, Divisor::ONE).expect("cast");
    drop(source);
    // It gets the memory that was just given back, and must not write it before the cast has read
    // it.
    let other = upload(&streams[2], Values::F32(&vec![-7.0; len]));
    let mut target = DeviceBuffer::new(&device(), DType::F32, len, "a test").expect("memory");
    let summed = streams[2].sum(&mut target, &[&wire], 0..len, Divisor::ONE, Fold::Replace, None);
    summed.expect("summed");
    drop((wire, other));
    let expected: Vec<f32> = values.iter().map(|it| half::bf16::from_f32(*it).to_f32()).collect();
    let found = download(&streams[0], &target);
    assert_same(found.values(), Values::F32(&expected), "cast and back");
}

/// pytorch issue 180900: a slow operation read memory that another buffer had been given.
#[test]
#[ignore = "needs a CUDA device"]
fn memory_that_is_given_back_is_not_overwritten_before_it_was_read() {
    let streams = [(); 3].map(|()| stream());
    (0..50).for_each(|seed| round(&streams, seed, 30_000));
}

#[test]
#[ignore = "needs a CUDA device"]
fn nothing_is_allocated_in_steady_state() {
    let _pool = pool();
    // No other test has buffers of these sizes.
    let streams = [(); 3].map(|()| stream());
    let len = 5_500_000;
    let allocations = || [4, 2].map(|size| device().allocations(size * len));
    round(&streams, 1, len);
    let first = allocations();
    assert!(first.iter().all(|count| *count > 0), "the first round allocates: {first:?}");
    (2..6).for_each(|seed| round(&streams, seed, len));
    assert_eq!(allocations(), first, "of f32, and of bf16");

    // What is given back to the driver must be had from it again.
    for stream in &streams {
        stream.moment().expect("a moment").wait("all of it", PATIENCE).expect("done");
    }
    device().release_spare_memory().expect("released");
    round(&streams, 9, len);
    assert!(allocations()[0] > first[0], "{:?} after {first:?}", allocations());
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_device_without_memory_says_how_much_was_asked_for() {
    let _pool = pool();
    let refused = DeviceBuffer::new(&device(), DType::F32, 1 << 45, "the moon").map(drop);
    let said = refused.expect_err("no device has that").to_string();
    let begins =
        "CUDA device 0 is out of memory: cannot allocate 140737488355328 bytes for the moon, ";
    assert!(said.starts_with(begins), "{said}");
    // And it goes on.
    let values = ordinary(1, 100);
    let stream = stream();
    let copy = upload(&stream, Values::F32(&values));
    assert_same(download(&stream, &copy).values(), Values::F32(&values), "a copy");
}

#[test]
#[ignore = "needs a CUDA device"]
fn lengths_and_dtypes_that_no_buffer_has_are_refused() {
    let too_long = DeviceBuffer::new(&device(), DType::F32, usize::MAX / 2, "the moon").map(drop);
    let said = too_long.expect_err("it is more than there is").to_string();
    assert!(said.starts_with("CUDA device 0 is out of memory: "), "{said}");
    let integers = DeviceBuffer::new(&device(), DType::I64, 8, "a test").map(drop);
    let said = integers.expect_err("kernels know no integers").to_string();
    let expected = "make a device buffer: i64 is not a dtype of parameters or gradients: \
                    expected f32, f16 or bf16";
    assert_eq!(said, expected);
}

/// As shards of several ranks become one flat buffer.
#[test]
#[ignore = "needs a CUDA device"]
fn parts_of_buffers_are_copied_to_parts_of_others() {
    let streams = [(); 3].map(|()| stream());
    let len = 10_000;
    let shards: Vec<_> = (0..3).map(|rank| ordinary(rank, len)).collect();
    let mut full = DeviceBuffer::new(&device(), DType::F32, 3 * len, "a test").expect("memory");
    for (rank, shard) in shards.iter().enumerate() {
        let source = upload(&streams[rank], Values::F32(shard));
        let to = rank * len..(rank + 1) * len;
        full.copy(&streams[2 - rank], to, &source, 0..len).expect("copied");
    }
    assert_same(download(&streams[0], &full).values(), Values::F32(&shards.concat()), "all");

    let other = upload(&streams[0], Values::F32(&[1.0; 64]));
    let mut refused = |to, from| {
        let outcome = full.copy(&streams[0], to, &other, from);
        outcome.expect_err("it does not fit").to_string()
    };
    assert_eq!(
        refused(0..8, 60..68),
        "copy: range 60..68 of a buffer of 64 elements, in a copy of 8 elements"
    );
    assert_eq!(
        refused(0..9, 0..8),
        "copy: range 0..9 of a buffer of 30000 elements, in a copy of 8 elements"
    );
}
