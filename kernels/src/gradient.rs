//! The trait through which a gradient is read without being copied, and its implementations.

use std::fmt::Debug;
use std::ops::Range;
use std::time::Duration;

use crate::buffer::HostBuffer;
use crate::cuda::{CudaError, DeviceBuffer, DevicePart, DeviceSlice, Notes, Packed, Stream};
use crate::divisor::Divisor;
use crate::element::Real;
use crate::values::Values;

/// The gradient of one parameter, flat and in row-major order. A reduction reads it in place,
/// without a copy.
///
/// An autograd implements this trait for its tensor. The tensor may be behind a lock, so values are
/// lent only for the duration of a visit. Several threads read at once, and the values must not
/// change until the reduction is complete.
pub trait GradientValues: Send + Sync + Debug {
    /// The number of elements of the gradient, which is that of its parameter.
    fn len(&self) -> usize;

    /// Calls `visit` exactly once, with exactly the elements of `range`, in f32, f16 or bf16.
    ///
    /// `visit` may read the gradients of other members, so reads nest. They always nest in the
    /// order of members. If the values are behind a lock, a thread must be able to hold it for
    /// reading more than once.
    ///
    /// # Panics
    ///
    /// If `range` reaches beyond [`len`](Self::len).
    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>));

    /// Whether the gradient has no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements in the memory of a device; `None` if they lie on the host. A reduction on that
    /// device uses this slice and does not call [`read`](Self::read).
    fn on_device(&self) -> Option<DeviceSlice<'_>> {
        None
    }
}

/// Has the gradient of parameter `param` lend the elements `range` to `visit`. All code that reads
/// gradients calls this function: a gradient that breaks its contract would otherwise be summed in
/// part, or twice, without an error.
///
/// # Panics
/// If the gradient is not lent exactly once, with as many elements as `range` has. Also if
/// [`GradientValues::read`] catches a panic of `visit`, which may have used a part of the elements.
pub fn read_once(
    gradient: &dyn GradientValues,
    param: usize,
    range: Range<usize>,
    visit: &mut dyn FnMut(Values<'_>),
) {
    let mut begun = 0;
    let mut ended = 0;
    let asked = range.len();
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

/// The time for which the host waits for the copy of a gradient that it reads.
const TO_READ: Duration = Duration::from_secs(120);

/// A read on the host copies the whole buffer to the host, and waits for the copy for at most 120
/// seconds.
impl GradientValues for DevicePart {
    fn len(&self) -> usize {
        self.slice().len()
    }

    /// # Panics
    /// If the copy to the host fails.
    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        read_on_host(&self.slice(), range, visit);
    }

    fn on_device(&self) -> Option<DeviceSlice<'_>> {
        Some(self.slice())
    }
}

/// A read on the host copies the whole buffer to the host, and waits for the copy for at most 120
/// seconds.
impl GradientValues for DeviceBuffer {
    fn len(&self) -> usize {
        DeviceBuffer::len(self)
    }

    /// # Panics
    /// If the copy to the host fails.
    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        read_on_host(&self.into(), range, visit);
    }

    fn on_device(&self) -> Option<DeviceSlice<'_>> {
        Some(self.into())
    }
}

/// Copies the whole buffer of a slice to the host, and lends elements of the slice from the copy.
fn read_on_host(slice: &DeviceSlice<'_>, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
    let buffer = slice.buffer();
    let start = slice.range().start;
    let copy = buffer.device().reader().and_then(|stream| buffer.read_back(stream, TO_READ));
    let copy = copy.unwrap_or_else(|error| panic!("cannot read a gradient: {error}"));
    visit(copy.values().slice(start + range.start..start + range.end));
}

impl Stream {
    /// Packs gradients for the wire as [`pack`](Self::pack) does, from host or device memory.
    /// Gradients on the host or on another device are first copied to this device. Each of
    /// `gradients` comes with its first element in `flat`, a multiple of 4, in any order. `None`
    /// stands for a gradient that is absent, and leaves zeros.
    ///
    /// # Errors
    /// The errors of [`pack`](Self::pack); [`CudaError::OutOfMemory`] if the device has no memory
    /// for a copy.
    ///
    /// # Panics
    /// If [`GradientValues::read`] of a gradient panics, or does not visit all elements exactly
    /// once: the message names the parameter, by its place in `gradients`.
    pub fn pack_gradients(
        &self,
        flat: &mut DeviceBuffer,
        gradients: &[(usize, Option<&dyn GradientValues>)],
        pre: Divisor,
        notes: Option<Notes<'_>>,
    ) -> Result<(), CudaError> {
        let numbered = gradients.iter().enumerate();
        let copies: Vec<Option<DeviceBuffer>> = numbered
            .map(|(param, (_, gradient))| self.copied(param, *gradient))
            .collect::<Result<_, _>>()?;
        let mut packed = Vec::with_capacity(gradients.len());
        for ((start, gradient), copy) in gradients.iter().zip(&copies) {
            let copy = copy.as_ref().map(DeviceSlice::from);
            let there = copy.or_else(|| gradient.and_then(GradientValues::on_device));
            packed.extend(there.map(|gradient| Packed { gradient, start: *start }));
        }
        // One without elements comes before the one at its place.
        packed.sort_unstable_by_key(|packed| (packed.start, packed.gradient.len()));
        self.pack(flat, &packed, pre, notes)
    }

    /// A copy of a gradient that does not lie on this device.
    fn copied(
        &self,
        param: usize,
        gradient: Option<&dyn GradientValues>,
    ) -> Result<Option<DeviceBuffer>, CudaError> {
        let is_there = |on: DeviceSlice<'_>| on.buffer().device() == self.device();
        let Some(gradient) = gradient.filter(|it| !it.on_device().is_some_and(is_there)) else {
            return Ok(None);
        };
        let mut copy = None;
        read_once(gradient, param, 0..gradient.len(), &mut |values| {
            let buffer =
                DeviceBuffer::new(self.device(), values.dtype(), values.len(), "a gradient");
            copy = Some(buffer.and_then(|mut buffer| {
                buffer.write(self, values)?;
                Ok(buffer)
            }));
        });
        copy.transpose()
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
