//! Gradients wherever they lie, packed for the wire; and elements that lie in a larger buffer.

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
use crate::gradient::GradientValues;
use crate::values::Values;

/// How long a gradient is waited for that is read on the host.
const TO_READ: Duration = Duration::from_secs(120);

/// Consecutive elements of a buffer.
#[derive(Clone, Debug)]
pub struct DeviceSlice<'a> {
    buffer: &'a DeviceBuffer,
    range: Range<usize>,
}

impl<'a> DeviceSlice<'a> {
    /// The elements of `range`.
    ///
    /// # Panics
    /// If it reaches beyond the end, or ends before it starts.
    #[must_use]
    pub fn new(buffer: &'a DeviceBuffer, range: Range<usize>) -> Self {
        let (Range { start, end }, len) = (range, buffer.len());
        assert!(start <= end && end <= len, "slice {start}..{end} of a buffer of {len} elements");
        Self { buffer, range: start..end }
    }

    /// The buffer in which they lie.
    #[must_use]
    pub fn buffer(&self) -> &'a DeviceBuffer {
        self.buffer
    }

    /// Which of its elements they are.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Their dtype.
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

/// The same, kept alive: a gradient that lies in a larger buffer.
#[derive(Clone, Debug)]
pub struct DevicePart {
    buffer: Arc<DeviceBuffer>,
    range: Range<usize>,
}

impl DevicePart {
    /// The elements of `range`.
    ///
    /// # Panics
    /// As [`DeviceSlice::new`].
    #[must_use]
    pub fn new(buffer: Arc<DeviceBuffer>, range: Range<usize>) -> Self {
        let range = DeviceSlice::new(&buffer, range).range();
        Self { buffer, range }
    }
}

/// Who reads it on the host waits for a copy of the whole buffer.
impl GradientValues for DevicePart {
    fn len(&self) -> usize {
        self.range.len()
    }

    /// # Panics
    /// If the device cannot copy it.
    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        let start = self.range.start;
        read_on_host(&self.buffer, start + range.start..start + range.end, visit);
    }

    fn on_device(&self) -> Option<DeviceSlice<'_>> {
        Some(DeviceSlice::new(&self.buffer, self.range.clone()))
    }
}

/// Who reads it on the host waits for a copy of all of it.
impl GradientValues for DeviceBuffer {
    fn len(&self) -> usize {
        DeviceBuffer::len(self)
    }

    /// # Panics
    /// If the device cannot copy it.
    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        read_on_host(self, range, visit);
    }

    fn on_device(&self) -> Option<DeviceSlice<'_>> {
        Some(self.into())
    }
}

fn read_on_host(buffer: &DeviceBuffer, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
    let copy = buffer.device().reader().and_then(|stream| buffer.read_back(stream, TO_READ));
    let copy = copy.unwrap_or_else(|error| panic!("a gradient on a device: {error}"));
    visit(copy.values().slice(range));
}

impl Stream {
    /// Packs gradients for the wire as [`pack`](Self::pack) does, wherever they lie: those that lie on the host, or on another
    /// device, are copied first. `gradients`: each with where it belongs in `flat`, in any order; `None` is left out.
    ///
    /// # Errors
    /// Those of [`pack`](Self::pack); [`CudaError::OutOfMemory`] if there is no room for a copy.
    ///
    /// # Panics
    /// If a gradient panics when it is read.
    pub fn pack_gradients(
        &self,
        flat: &mut DeviceBuffer,
        gradients: &[(usize, Option<&dyn GradientValues>)],
        pre: Divisor,
        notes: Option<Notes<'_>>,
    ) -> Result<(), CudaError> {
        let copied = |(_, gradient): &(usize, Option<&dyn GradientValues>)| self.copied(*gradient);
        let copies: Vec<Option<DeviceBuffer>> =
            gradients.iter().map(copied).collect::<Result<_, _>>()?;
        let mut packed = Vec::with_capacity(gradients.len());
        for ((start, gradient), copy) in gradients.iter().zip(&copies) {
            let copy = copy.as_ref().map(DeviceSlice::from);
            let there = copy.or_else(|| gradient.and_then(GradientValues::on_device));
            packed.extend(there.map(|gradient| Packed { gradient, start: *start }));
        }
        packed.sort_unstable_by_key(|packed| packed.start);
        self.pack(flat, &packed, pre, notes)
    }

    /// A copy of a gradient that does not lie on this device.
    fn copied(
        &self,
        gradient: Option<&dyn GradientValues>,
    ) -> Result<Option<DeviceBuffer>, CudaError> {
        let is_there = |on: DeviceSlice<'_>| on.buffer().device() == self.device();
        let Some(gradient) = gradient.filter(|it| !it.on_device().is_some_and(is_there)) else {
            return Ok(None);
        };
        let mut copy = None;
        gradient.read(0..gradient.len(), &mut |values| {
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
