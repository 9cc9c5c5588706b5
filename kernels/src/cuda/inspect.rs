//! The squared norm of a buffer, and its first element that is not finite.

use std::ops::Range;
use std::time::Duration;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::kernel::Kernel;
use super::launch::{Launch, WIDTH};
use super::noted::{read_words, words};
use super::stream::Stream;
use crate::MatrixDType;

/// The largest number of blocks, and the number of threads, of `inspect.cu`. They are the same on all devices, so that sums have one
/// order.
const BLOCKS: u32 = 512;
const THREADS: u32 = 256;

/// The number of 8-byte words in the result of one block.
const SEEN: usize = 2;

/// The number of f32 that have room for the results of all blocks.
pub(super) const PARTIAL: usize = 2 * SEEN * BLOCKS as usize;

/// The result of an inspection of a buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// The sum of the squares of its elements, in f64.
    pub squared_norm: f64,
    /// The index of the first element that is infinite or NaN; `None` if all are finite.
    pub first_non_finite: Option<u64>,
}

impl Stream {
    /// Computes the squared norm of each of these f32 buffers and finds its first element that is not finite, in one pass over each.
    /// Makes two launches per buffer, and waits for the results for at most `patience`. The order of additions is the same on all
    /// devices, and differs from that of [`squared_norm`](crate::squared_norm).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer is not f32 or is of another device; [`CudaError::Late`] if the results are not there after
    /// `patience`; [`CudaError::OutOfMemory`] if the device has no memory for them; [`CudaError::Driver`] if a call of the driver fails,
    /// or an operation before has failed.
    pub fn inspect(
        &self,
        all: &[&DeviceBuffer],
        patience: Duration,
    ) -> Result<Vec<Seen>, CudaError> {
        let mut seen = words(self, SEEN * all.len(), "results of an inspection")?;
        for (index, values) in all.iter().enumerate() {
            self.inspect_one(values, (&mut seen, SEEN * index))?;
        }
        let seen_of = |[squares, first]: &[u64; SEEN]| Seen {
            squared_norm: f64::from_bits(*squares),
            first_non_finite: (*first != u64::MAX).then_some(*first),
        };
        let words = read_words(self, &seen, patience)?;
        Ok(words.as_chunks().0.iter().map(seen_of).collect())
    }

    /// Inspects one buffer, and writes the result to `seen` from word `at` on.
    fn inspect_one(
        &self,
        values: &DeviceBuffer,
        (seen, at): (&mut DeviceBuffer, usize),
    ) -> Result<(), CudaError> {
        values.check("inspect", DType::F32, values.len())?;
        let mut blocks = words(self, SEEN * BLOCKS as usize, "partial results of an inspection")?;
        let of = (MatrixDType::F32, values, 0..values.len());
        let count = self.inspect_parts(of, &mut blocks)?;
        let (from, to) = (blocks.address(0), seen.address(2 * at));
        let launch = Launch::fixed(Kernel::InspectBlocks, (1, BLOCKS));
        let launch = launch.argument(&from).argument(&count).argument(&to);
        // SAFETY: CU-5, one `Seen` a block is read, and one written.
        unsafe { launch.issue(self, (&[&blocks], &mut [seen])) }
    }

    /// Computes the squared norm of a range of an f32 buffer, whose elements are rounded to `dtype` first. The result is a `Seen` at the beginning
    /// of `squares`, which has [`PARTIAL`] f32. Makes two launches.
    pub(super) fn squares(
        &self,
        of: (MatrixDType, &DeviceBuffer, Range<usize>),
        squares: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        let count = self.inspect_parts(of, squares)?;
        let address = squares.address(0);
        let launch = Launch::fixed(Kernel::InspectBlocks, (1, BLOCKS));
        let launch = launch.argument(&address).argument(&count).argument(&address);
        // SAFETY: CU-5, one `Seen` a block is read, and one written after that.
        unsafe { launch.issue(self, (&[], &mut [squares])) }
    }

    /// Writes one `Seen` a block to `blocks`, and returns their number.
    fn inspect_parts(
        &self,
        (dtype, values, range): (MatrixDType, &DeviceBuffer, Range<usize>),
        blocks: &mut DeviceBuffer,
    ) -> Result<u64, CudaError> {
        let (from, to) = (values.address(range.start), blocks.address(0));
        let (len, wanted) = (range.len() as u64, range.len().div_ceil(WIDTH * THREADS as usize));
        let count = u32::try_from(wanted).unwrap_or(BLOCKS).clamp(1, BLOCKS);
        let launch = Launch::fixed(Kernel::Inspect(dtype), (count, THREADS));
        let launch = launch.argument(&from).argument(&len).argument(&to);
        // SAFETY: CU-5, so many elements are read, and one `Seen` a block is written.
        unsafe { launch.issue(self, (&[values], &mut [blocks])) }?;
        Ok(u64::from(count))
    }
}
