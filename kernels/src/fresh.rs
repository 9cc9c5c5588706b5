//! New vectors that are zeroed by the threads that write them.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::Zeroable;

/// A vector under construction, in parts that several threads may write. Each thread zeroes a piece
/// of its part just before it writes the piece, so the zeros do not pass through memory, as those
/// of a new vector of zeros do.
#[derive(Debug)]
pub struct FreshVec<T> {
    /// A vector without elements, and with a capacity of at least `len`.
    values: Vec<T>,
    len: usize,
    /// Number of elements that are zeroed.
    zeroed: AtomicUsize,
}

impl<T: Copy + Zeroable> FreshVec<T> {
    /// Allocates a vector of `len` elements.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { values: Vec::with_capacity(len), len, zeroed: AtomicUsize::new(0) }
    }

    /// Returns the parts of `step` elements, in order. The last one may be shorter.
    ///
    /// # Panics
    /// If it was called before, or `step` is 0.
    pub fn parts(&mut self, step: usize) -> impl Iterator<Item = FreshPart<'_, T>> {
        assert_eq!(*self.zeroed.get_mut(), 0, "the parts of a vector were taken twice");
        let zeroed = &self.zeroed;
        let rest = &mut self.values.spare_capacity_mut()[..self.len];
        rest.chunks_mut(step).map(move |rest| FreshPart { rest, zeroed })
    }

    /// Returns the vector.
    ///
    /// # Panics
    /// If an element of a part was not taken.
    #[must_use]
    pub fn into_vec(mut self) -> Vec<T> {
        assert_eq!(*self.zeroed.get_mut(), self.len, "the elements of a vector that were zeroed");
        // SAFETY: K-7, each element is counted once when it is zeroed, and all are counted.
        unsafe { self.values.set_len(self.len) };
        self.values
    }
}

/// A part of a [`FreshVec`].
#[derive(Debug)]
pub struct FreshPart<'a, T> {
    rest: &'a mut [MaybeUninit<T>],
    zeroed: &'a AtomicUsize,
}

impl<'a, T: Copy + Zeroable> FreshPart<'a, T> {
    /// Takes the next `len` elements, which are zeros.
    ///
    /// # Panics
    /// If fewer are left.
    pub fn take(&mut self, len: usize) -> &'a mut [T] {
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(len);
        self.rest = rest;
        taken.fill(MaybeUninit::zeroed());
        self.zeroed.fetch_add(len, Ordering::Relaxed);
        // SAFETY: K-7, the elements were zeroed, and zeros are a value of the type.
        unsafe { taken.assume_init_mut() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_has_what_was_written_and_zeros() {
        for (len, step, piece) in [(10, 4, 3), (12, 4, 4), (7, 100, 2), (0, 3, 1)] {
            let mut fresh = FreshVec::new(len);
            std::thread::scope(|scope| {
                for (index, mut part) in fresh.parts(step).enumerate() {
                    scope.spawn(move || {
                        while !part.rest.is_empty() {
                            let len = part.rest.len().min(piece);
                            part.take(len)[0] = index as f32 + 1.0;
                        }
                    });
                }
            });
            let expected = (0..len).map(|element| match element % step % piece {
                0 => (element / step) as f32 + 1.0,
                _ => 0.0,
            });
            assert_eq!(fresh.into_vec(), expected.collect::<Vec<_>>());
        }
    }

    #[test]
    #[should_panic(expected = "the elements of a vector that were zeroed")]
    fn a_vector_whose_elements_were_not_all_taken_is_refused() {
        let mut fresh = FreshVec::<f32>::new(5);
        fresh.parts(2).for_each(|mut part| part.take(1).fill(2.0));
        let _ = fresh.into_vec();
    }

    #[test]
    #[should_panic(expected = "taken twice")]
    fn parts_are_taken_once() {
        let mut fresh = FreshVec::<f32>::new(2);
        fresh.parts(2).for_each(|mut part| part.take(2).fill(1.0));
        let _ = fresh.parts(1).count();
    }
}
