//! Packing of gradients in host or device memory, and slices of device buffers.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::noted::Notes;
use super::pack::Packed;
use super::stream::Stream;
use crate::Divisor;
use crate::gradient::{GradientValues, read_once};
use crate::values::Values;

/// The time for which the host waits for the copy of a gradient that it reads.
const TO_READ: Duration = Duration::from_secs(120);

/// A slice of a [`DeviceBuffer`]: consecutive elements of it.
#[derive(Clone, Debug)]
pub struct DeviceSlice<'a> {
    buffer: &'a DeviceBuffer,
    range: Range<usize>,
}

impl<'a> DeviceSlice<'a> {
    /// The elements `range` of `buffer`.
    ///
    /// # Panics
    /// If `range` reaches beyond the end, or ends before it starts.
    #[must_use]
    pub fn new(buffer: &'a DeviceBuffer, range: Range<usize>) -> Self {
        let (Range { start, end }, len) = (range, buffer.len());
        assert!(start <= end && end <= len, "slice {start}..{end} of a buffer of {len} elements");
        Self { buffer, range: start..end }
    }

    /// The buffer in which the elements lie.
    #[must_use]
    pub fn buffer(&self) -> &'a DeviceBuffer {
        self.buffer
    }

    /// The range of the elements in the buffer.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The dtype of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.buffer.dtype()
    }
}

impl<'a> From<&'a DeviceBuffer> for DeviceSlice<'a> {
    fn from(buffer: &'a DeviceBuffer) -> Self {
        Self::new(buffer, 0..buffer.len())
    }
}

/// Consecutive elements of a device buffer, which this value keeps alive: a gradient that lies in a larger buffer.
#[derive(Clone, Debug)]
pub struct DevicePart {
    buffer: Arc<DeviceBuffer>,
    range: Range<usize>,
}

impl DevicePart {
    /// The elements `range` of `buffer`.
    ///
    /// # Panics
    /// If `range` reaches beyond the end, or ends before it starts.
    #[must_use]
    pub fn new(buffer: Arc<DeviceBuffer>, range: Range<usize>) -> Self {
        let range = DeviceSlice::new(&buffer, range).range();
        Self { buffer, range }
    }
}

/// A read on the host copies the whole buffer to the host, and waits for the copy for at most 120 seconds.
impl GradientValues for DevicePart {
    fn len(&self) -> usize {
        self.range.len()
    }

    /// # Panics
    /// If the copy to the host fails.
    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        let start = self.range.start;
        read_on_host(&self.buffer, start + range.start..start + range.end, visit);
    }

    fn on_device(&self) -> Option<DeviceSlice<'_>> {
        Some(DeviceSlice::new(&self.buffer, self.range.clone()))
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
        read_on_host(self, range, visit);
    }

    fn on_device(&self) -> Option<DeviceSlice<'_>> {
        Some(self.into())
    }
}

fn read_on_host(buffer: &DeviceBuffer, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
    let copy = buffer.device().reader().and_then(|stream| buffer.read_back(stream, TO_READ));
    let copy = copy.unwrap_or_else(|error| panic!("cannot read a gradient: {error}"));
    visit(copy.values().slice(range));
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
