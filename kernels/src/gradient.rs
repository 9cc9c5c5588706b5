//! The seam by which a gradient is lent without being copied.

use std::fmt::Debug;
use std::ops::Range;

use crate::element::Real;
use crate::values::Values;

/// A gradient of one parameter, flat and in row-major order, that others read where it lies.
///
/// An autograd implements this for its tensor, which may lie behind a lock: the values are lent for the duration of a
/// visit only. Several threads read at once, and the values must not change until the reduction is complete.
pub trait GradientValues: Send + Sync + Debug {
    /// How many elements the gradient has: as many as its parameter.
    fn len(&self) -> usize;

    /// Calls `visit` exactly once, with exactly the elements of `range`.
    ///
    /// `visit` may read gradients of other members, so reads nest: in the order of members, and in the same order wherever
    /// they do. Where values lie behind a lock, it must be one that a thread can hold for reading more than once.
    ///
    /// # Panics
    ///
    /// If `range` reaches beyond [`len`](Self::len).
    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>));

    /// Whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same elements in the memory of a device, if that is where they lie: then a reduction there does not
    /// [read](Self::read) them.
    #[cfg(feature = "cuda")]
    fn on_device(&self) -> Option<crate::cuda::DeviceSlice<'_>> {
        None
    }
}

impl<T: Real> GradientValues for Vec<T> {
    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        visit(T::values(&self[range]));
    }
}
