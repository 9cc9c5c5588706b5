//! Slices of device buffers.

use std::ops::Range;
use std::sync::Arc;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;

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

    /// Borrows the elements.
    pub(crate) fn slice(&self) -> DeviceSlice<'_> {
        DeviceSlice::new(&self.buffer, self.range.clone())
    }
}
