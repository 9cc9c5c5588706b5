//! Buffers that several threads fill at once, each thread in its own part.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::{fmt, slice};

use half::{bf16, f16};

use crate::buffer::HostBuffer;
use crate::values::ValuesMut;

/// A vector whose parts can be written through a shared reference.
///
/// The borrow checker cannot see that blocks of an output do not overlap when threads claim them
/// from a counter. Here the caller promises it (invariant K-1). All other conditions are checked.
///
/// A thread that reads the whole vector afterwards must have waited for the writers (joined them,
/// or seen their counter with `Acquire`). [`into_vec`](Self::into_vec) takes the value itself, so
/// no shared reference exists by then.
///
/// Because a shared reference can write, the type is invariant in `T`. A vector of elements with a
/// long lifetime cannot be passed as one with a shorter lifetime, into which an element that lives
/// too short might be written.
///
/// ```compile_fail
/// # use hsdp_kernels::DisjointVec;
/// fn lend<'a>(long: &'a DisjointVec<&'static str>) -> &'a DisjointVec<&'a str> {
///     long // no: lifetime may not live long enough
/// }
/// ```
pub struct DisjointVec<T> {
    // The raw parts of a vector. No `Vec` is kept, because a reference to it would cover all
    // elements.
    start: NonNull<T>,
    len: usize,
    capacity: usize,
    /// Invariant in `T`, as a `Cell` is.
    elements: PhantomData<fn(T) -> T>,
}

// SAFETY: K-1, it owns its elements as the vector did.
unsafe impl<T: Send> Send for DisjointVec<T> {}

// SAFETY: K-1, the slices that a shared reference gives out are exclusive, so elements are sent to
// other threads and never shared.
unsafe impl<T: Send> Sync for DisjointVec<T> {}

impl<T> DisjointVec<T> {
    /// The number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Borrows the elements of `range` for writing.
    ///
    /// # Panics
    ///
    /// If `range` reaches beyond the end, or ends before it starts.
    ///
    /// # Safety
    ///
    /// K-1: slices that are in use at the same time must not overlap.
    #[expect(clippy::mut_from_ref, reason = "K-1: the caller keeps slices apart")]
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [T] {
        let Range { start, end } = range;
        assert!(
            start <= end && end <= self.len,
            "slice {start}..{end} of a buffer of {} elements",
            self.len
        );
        // SAFETY: K-1, `start` is at most `len`, which is within the allocation.
        let first = unsafe { self.start.add(start) };
        // SAFETY: K-1, the range is within the initialized elements, and the caller keeps slices
        // apart.
        unsafe { slice::from_raw_parts_mut(first.as_ptr(), end - start) }
    }

    /// Returns the vector with the elements that were written. Nothing is copied.
    pub fn into_vec(self) -> Vec<T> {
        let this = ManuallyDrop::new(self);
        // SAFETY: K-1, these are the parts of the vector, and `this` is not dropped.
        unsafe { this.rebuild() }
    }

    /// The vector that this was made from.
    ///
    /// # Safety
    ///
    /// K-1: it is called once, and `self` is not used afterwards.
    unsafe fn rebuild(&self) -> Vec<T> {
        // SAFETY: K-1, the parts come from one vector, unchanged, and the caller uses them once.
        unsafe { Vec::from_raw_parts(self.start.as_ptr(), self.len, self.capacity) }
    }
}

impl<T> From<Vec<T>> for DisjointVec<T> {
    fn from(values: Vec<T>) -> Self {
        // The vector is taken apart without being dropped: the result owns the elements.
        let mut values = ManuallyDrop::new(values);
        let len = values.len();
        let capacity = values.capacity();
        // SAFETY: K-1, the pointer of a vector is never null.
        let start = unsafe { NonNull::new_unchecked(values.as_mut_ptr()) };
        Self { start, len, capacity, elements: PhantomData }
    }
}

impl<T> Drop for DisjointVec<T> {
    fn drop(&mut self) {
        // SAFETY: K-1, a value is dropped once, and `into_vec` does not drop it.
        drop(unsafe { self.rebuild() });
    }
}

impl<T> fmt::Debug for DisjointVec<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A thread may be writing the elements, so they are not read.
        formatter.debug_struct("DisjointVec").field("len", &self.len).finish_non_exhaustive()
    }
}

/// A [`HostBuffer`] whose parts can be written through a shared reference. [`DisjointVec`] has the
/// conditions.
#[derive(Debug)]
pub enum DisjointBuffer {
    /// Elements of dtype f32.
    F32(DisjointVec<f32>),
    /// Elements of dtype f16.
    F16(DisjointVec<f16>),
    /// Elements of dtype bf16.
    BF16(DisjointVec<bf16>),
}

impl DisjointBuffer {
    /// The number of elements.
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Borrows the elements of `range` for writing.
    ///
    /// # Panics
    ///
    /// If `range` reaches beyond the end, or ends before it starts.
    ///
    /// # Safety
    ///
    /// K-1: slices that are in use at the same time must not overlap.
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> ValuesMut<'_> {
        match self {
            // SAFETY: K-1, the caller's promise is passed on.
            Self::F32(values) => ValuesMut::F32(unsafe { values.slice_mut(range) }),
            // SAFETY: K-1, as above.
            Self::F16(values) => ValuesMut::F16(unsafe { values.slice_mut(range) }),
            // SAFETY: K-1, as above.
            Self::BF16(values) => ValuesMut::BF16(unsafe { values.slice_mut(range) }),
        }
    }

    /// Returns the buffer with the elements that were written. Nothing is copied.
    pub fn into_buffer(self) -> HostBuffer {
        match self {
            Self::F32(values) => HostBuffer::F32(values.into_vec()),
            Self::F16(values) => HostBuffer::F16(values.into_vec()),
            Self::BF16(values) => HostBuffer::BF16(values.into_vec()),
        }
    }
}

impl From<HostBuffer> for DisjointBuffer {
    fn from(buffer: HostBuffer) -> Self {
        match buffer {
            HostBuffer::F32(values) => Self::F32(values.into()),
            HostBuffer::F16(values) => Self::F16(values.into()),
            HostBuffer::BF16(values) => Self::BF16(values.into()),
        }
    }
}

#[cfg(test)]
mod tests;
