//! The trait through which a gradient is read without being copied, and its implementations.

mod device;

use std::fmt::Debug;
use std::ops::Range;

use crate::buffer::HostBuffer;
use crate::cuda::DeviceSlice;
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
    fn on_device(&self) -> Option<DeviceSlice<'_>> {
        None
    }
}

/// Has the gradient of parameter `param` lend the elements `range` to `visit`. All code that reads gradients calls this function: a
/// gradient that breaks its contract would otherwise be summed in part, or twice, without an error.
///
/// # Panics
/// If the gradient is not lent exactly once, with as many elements as `range` has. Also if [`GradientValues::read`] catches a
/// panic of `visit`, which may have used a part of the elements.
pub fn read_once(
    gradient: &dyn GradientValues,
    param: usize,
    range: Range<usize>,
    visit: &mut dyn FnMut(Values<'_>),
) {
    let (mut begun, mut ended, asked) = (0, 0, range.len());
    gradient.read(range, &mut |values| {
        begun += 1;
        let lent = values.len();
        assert!(
            lent == asked,
            "the gradient of parameter {param} was lent with {lent} elements, not {asked}"
        );
        visit(values);
        ended += 1;
    });
    assert!(begun == 1, "the gradient of parameter {param} was lent {begun} times, not once");
    assert!(ended == 1, "the gradient of parameter {param} hid a panic of the code that reads it");
}

impl<T: Real> GradientValues for Vec<T> {
    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        visit(T::values(&self[range]));
    }
}

impl GradientValues for HostBuffer {
    fn len(&self) -> usize {
        HostBuffer::len(self)
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        visit(self.values().slice(range));
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Lends slices of so many elements, one after the other, and hides panics.
    #[derive(Debug)]
    struct Lending(Vec<usize>);

    impl GradientValues for Lending {
        fn len(&self) -> usize {
            8
        }

        fn read(&self, _: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
            for lent in &self.0 {
                let values = vec![1.0; *lent];
                drop(catch_unwind(AssertUnwindSafe(|| visit(Values::F32(&values)))));
            }
        }
    }

    /// The message of the panic of a read, if it panics.
    fn refusal(lends: &[usize], visit: &mut dyn FnMut(Values<'_>)) -> Option<String> {
        let gradient = Lending(lends.to_vec());
        let read = AssertUnwindSafe(|| read_once(&gradient, 3, 0..8, visit));
        let panic = catch_unwind(read).err()?;
        Some(*panic.downcast::<String>().expect("a formatted message"))
    }

    #[test]
    fn a_gradient_is_lent_once_and_whole() {
        let said = |lends: &[usize]| refusal(lends, &mut |_| ());
        assert_eq!(said(&[8]), None);
        for (lends, expected) in
            [(&[][..], "lent 0 times, not once"), (&[8, 8], "lent 2 times, not once")]
        {
            let expected = format!("the gradient of parameter 3 was {expected}");
            assert_eq!(said(lends), Some(expected));
        }
        let hidden = "the gradient of parameter 3 hid a panic of the code that reads it".to_owned();
        assert_eq!(said(&[7]), Some(hidden.clone()));
        assert_eq!(refusal(&[8], &mut |_| panic!("on purpose")), Some(hidden));
        // In halves.
        assert!(said(&[4, 4]).is_some());
    }
}
