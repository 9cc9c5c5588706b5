//! K-1: `threads_fill_one_vector` and `claimed_blocks_cover_a_buffer` write concurrently. The other
//! tests cover the checks one by one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::{DisjointBuffer, DisjointVec};
use crate::buffer::HostBuffer;
use crate::convert::cast;
use crate::tests::REALS;

#[test]
fn threads_fill_one_vector() {
    let shared = DisjointVec::from(vec![String::new(); 8]);
    thread::scope(|scope| {
        for thread in 0..4 {
            let shared = &shared;
            scope.spawn(move || {
                // SAFETY: K-1, each thread has two elements of its own.
                let part = unsafe { shared.slice_mut(2 * thread..2 * thread + 2) };
                for element in part {
                    *element = format!("thread {thread}");
                }
            });
        }
    });
    let filled = shared.into_vec();
    for (index, element) in filled.iter().enumerate() {
        assert_eq!(*element, format!("thread {}", index / 2));
    }
}

#[test]
fn claimed_blocks_cover_a_buffer() {
    for dtype in REALS {
        let target = DisjointBuffer::from(HostBuffer::zeros(dtype, 10).unwrap());
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let block @ 0..4 = next.fetch_add(1, Ordering::Relaxed) {
                        let range = 3 * block..10.min(3 * block + 3);
                        let values: Vec<f32> = range.clone().map(|index| index as f32).collect();
                        // SAFETY: K-1, a block is claimed once.
                        cast(unsafe { target.slice_mut(range) }, &values);
                    }
                });
            }
        });
        let filled = target.into_buffer().values().to_f32();
        assert_eq!(filled, (0..10).map(|index| index as f32).collect::<Vec<_>>());
    }
}

#[test]
fn the_vector_comes_back_with_its_capacity() {
    let mut vector = Vec::with_capacity(100);
    vector.extend([1, 2, 3]);
    let address = vector.as_ptr();
    let vector = DisjointVec::from(vector).into_vec();
    assert_eq!((vector.as_ptr(), vector.capacity()), (address, 100));
    assert_eq!(vector, [1, 2, 3]);
}

#[test]
fn elements_are_dropped_with_it() {
    let element = std::sync::Arc::new(());
    drop(DisjointVec::from(vec![element.clone(), element.clone()]));
    assert_eq!(std::sync::Arc::strong_count(&element), 1);
}

#[test]
fn nothing_can_be_lent_as_often_as_wanted() {
    let empty = DisjointVec::<f32>::from(Vec::new());
    assert!(empty.is_empty());
    // SAFETY: K-1, empty slices overlap with nothing.
    let first = unsafe { empty.slice_mut(0..0) };
    // SAFETY: K-1, as above.
    let second = unsafe { empty.slice_mut(0..0) };
    assert_eq!(first, second);
}

#[test]
#[should_panic(expected = "slice 2..5 of a buffer of 4 elements")]
fn a_range_beyond_the_end_is_refused() {
    let shared = DisjointVec::from(vec![0; 4]);
    // SAFETY: K-1, this is the only slice.
    unsafe { shared.slice_mut(2..5) };
}

#[test]
#[should_panic(expected = "slice 3..2 of a buffer of 4 elements")]
fn a_range_that_ends_before_it_starts_is_refused() {
    let shared = DisjointVec::from(vec![0; 4]);
    #[expect(clippy::reversed_empty_ranges, reason = "the test needs one")]
    // SAFETY: K-1, this is the only slice.
    unsafe {
        shared.slice_mut(3..2)
    };
}
