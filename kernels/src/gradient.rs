//! The trait through which a gradient is read without being copied.

use std::fmt::Debug;
use std::ops::Range;

use crate::element::Real;
use crate::values::Values;

/// The gradient of one parameter, flat and in row-major order. A reduction reads it in place, without a copy.
///
/// An autograd implements this trait for its tensor. The tensor may be behind a lock, so values are lent only for the
/// duration of a visit. Several threads read at once, and the values must not change until the reduction is complete.
pub trait GradientValues: Send + Sync + Debug {
    /// The number of elements of the gradient, which is that of its parameter.
    fn len(&self) -> usize;

    /// Calls `visit` exactly once, with exactly the elements of `range`, in f32, f16 or bf16.
    ///
    /// `visit` may read the gradients of other members, so reads nest. They always nest in the order of members. If the
    /// values are behind a lock, a thread must be able to hold it for reading more than once.
    ///
    /// # Panics
    ///
    /// If `range` reaches beyond [`len`](Self::len).
    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>));

    /// Whether the gradient has no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements in the memory of a device; `None` if they lie on the host. A reduction on that device uses this slice
    /// and does not call [`read`](Self::read).
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
