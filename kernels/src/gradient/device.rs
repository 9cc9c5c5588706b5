//! Gradients in device memory, and the packing of gradients in host or device memory.

use std::ops::Range;
use std::time::Duration;

use super::{GradientValues, read_once};
use crate::cuda::{CudaError, DeviceBuffer, DevicePart, DeviceSlice, Notes, Packed, Stream};
use crate::divisor::Divisor;
use crate::values::Values;

/// The time for which the host waits for the copy of a gradient that it reads.
const TO_READ: Duration = Duration::from_secs(120);

/// A read on the host copies the whole buffer to the host, and waits for the copy for at most 120 seconds.
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

/// A read on the host copies the whole buffer to the host, and waits for the copy for at most 120 seconds.
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
    let (buffer, start) = (slice.buffer(), slice.range().start);
    let copy = buffer.device().reader().and_then(|stream| buffer.read_back(stream, TO_READ));
    let copy = copy.unwrap_or_else(|error| panic!("cannot read a gradient: {error}"));
    visit(copy.values().slice(start + range.start..start + range.end));
}

impl Stream {
    /// Packs gradients for the wire as [`pack`](Self::pack) does, from host or device memory. Gradients on the host or on another
    /// device are first copied to this device. Each of `gradients` comes with its first element in `flat`, a multiple of 4, in any
    /// order. `None` stands for a gradient that is absent, and leaves zeros.
    ///
    /// # Errors
    /// The errors of [`pack`](Self::pack); [`CudaError::OutOfMemory`] if the device has no memory for a copy.
    ///
    /// # Panics
    /// If [`GradientValues::read`] of a gradient panics, or does not visit all elements exactly once: the message names the
    /// parameter, by its place in `gradients`.
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
