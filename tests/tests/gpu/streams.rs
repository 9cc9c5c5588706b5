//! The order of operations on several streams.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Packed, Stream, Together};
use hsdp_kernels::{Divisor, Fold, Values};
use hsdp_sharding::DType;

use super::numbers::ordinary;
use super::{assert_same, device, download, stream, upload};

/// Adds 1 a hundred times, each time on another stream.
#[test]
#[ignore = "needs a CUDA device"]
fn what_one_stream_writes_the_next_reads() {
    let streams = [(); 4].map(|()| stream());
    let len = 10_000;
    let one = upload(&streams[0], Values::F32(&vec![1.0; len]));
    let mut sum = upload(&streams[0], Values::F32(&vec![0.0; len]));
    for turn in 0..100 {
        let stream = &streams[turn % 4];
        stream.sum(&mut sum, &[&one], 0..len, Divisor::ONE, Fold::Add, None).expect("summed");
    }
    let found = download(&streams[0], &sum);
    assert_same(found.values(), Values::F32(&vec![100.0; len]), "a hundred ones");
}

/// As ranks that share a device: each packs its own, and reads what all have packed.
#[test]
#[ignore = "needs a CUDA device"]
fn ranks_that_are_threads_read_what_the_others_have_written() {
    let ranks = 4;
    let len = 4096;
    let pack = |rank: u64| {
        let stream = stream();
        let gradient = upload(&stream, Values::F32(&ordinary(rank, len)));
        let mut wire = DeviceBuffer::new(&device(), DType::F32, len, "a test").expect("memory");
        let packed = [Packed { gradient: (&gradient).into(), start: 0 }];
        stream.pack(&mut wire, &packed, Divisor::ONE, None).expect("packed");
        wire
    };
    for _ in 0..10 {
        let wires: Arc<Vec<_>> = Arc::new(thread::scope(|scope| {
            let started: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || pack(rank))).collect();
            started.into_iter().map(|rank| rank.join().expect("no panic")).collect()
        }));
        let mut expected = vec![0.0; len];
        for rank in 0..ranks {
            expected.iter_mut().zip(ordinary(rank, len)).for_each(|(sum, value)| *sum += value);
        }
        let reduce = || {
            let stream = stream();
            let all = wires.iter().collect::<Vec<_>>();
            let mut target = upload(&stream, Values::F32(&vec![0.0; len]));
            let summed = stream.sum(&mut target, &all, 0..len, Divisor::ONE, Fold::Replace, None);
            summed.expect("summed");
            download(&stream, &target)
        };
        thread::scope(|scope| {
            let started: Vec<_> = (0..ranks).map(|_| scope.spawn(reduce)).collect();
            for rank in started {
                let found = rank.join().expect("no panic");
                assert_same(found.values(), Values::F32(&expected), "the sum of all ranks");
            }
        });
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn who_waits_longer_than_it_wants_to_is_told_what_for() {
    let stream = stream();
    let len = 5_000_000;
    let one = upload(&stream, Values::F32(&vec![1.0; len]));
    let mut sum = upload(&stream, Values::F32(&vec![0.0; len]));
    for _ in 0..100 {
        stream.sum(&mut sum, &[&one], 0..len, Divisor::ONE, Fold::Add, None).expect("summed");
    }
    let sums = stream.moment().expect("a moment");
    let late = sums.wait("a hundred sums", Duration::ZERO).expect_err("they take their time");
    assert_eq!(late.to_string(), "a hundred sums on CUDA device 0 was not done in 0 ms");
    assert_same(download(&stream, &sum).values(), Values::F32(&vec![100.0; len]), "sums");
}

/// A library that fails may go on issuing in the background, as NCCL does until it is aborted.
#[test]
#[ignore = "needs a CUDA device"]
fn a_stream_of_a_call_that_failed_is_never_destroyed() {
    let dropped = stream();
    let mut raw = None;
    let mut parts = [Together { stream: &dropped, reads: Vec::new(), writes: Vec::new() }];
    let failed = Stream::enqueue_together(&mut parts, |raws| {
        raw = Some(raws[0]);
        let problem = "a failure on purpose".to_owned();
        Err(CudaError::Mismatch { operation: "a test", problem })
    });
    failed.expect_err("the call fails");
    drop(dropped);
    // SAFETY: CU-7, the stream was not destroyed.
    let same = unsafe { Stream::foreign(&device(), raw.expect("it was called")) };
    let buffer = upload(&same, Values::F32(&[1.0, 2.0, 3.0]));
    assert_eq!(download(&same, &buffer).values().to_f32(), [1.0, 2.0, 3.0]);
}
