//! The squared norm of a buffer, and whether it is finite.

use std::time::Duration;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::launch::{Launch, WIDTH};
use super::noted::{read_words, words};
use super::source::Kernel;
use super::stream::Stream;

/// Blocks, at the most, and threads of `inspect.cu`: the same on all devices, so that sums have one order.
const BLOCKS: u32 = 512;
const THREADS: u32 = 256;

/// Words of 8 bytes in what one block has seen.
const SEEN: usize = 2;

/// What was seen of some elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// The sum of their squares, in f64.
    pub squared_norm: f64,
    /// The index of the first that is infinite or NaN.
    pub first_non_finite: Option<u64>,
}

impl Stream {
    /// Sums up the squares of f32 elements and looks for one that is not finite, in one pass over each of `all`. Waits for what was
    /// seen. The order of additions is the same on all devices, and another than that of [`squared_norm`](crate::squared_norm).
    /// Two launches each.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if one is not f32; [`CudaError::Late`] after `patience`; [`CudaError::OutOfMemory`];
    /// [`CudaError::Driver`].
    pub fn inspect(
        &self,
        all: &[&DeviceBuffer],
        patience: Duration,
    ) -> Result<Vec<Seen>, CudaError> {
        let mut seen = words(self, SEEN * all.len(), "what was seen")?;
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

    /// Into `seen`, from this of its words on.
    fn inspect_one(
        &self,
        values: &DeviceBuffer,
        (seen, at): (&mut DeviceBuffer, usize),
    ) -> Result<(), CudaError> {
        values.check("inspect", DType::F32, values.len())?;
        let mut blocks = words(self, SEEN * BLOCKS as usize, "what blocks have seen")?;
        let (from, len, to) = (values.address(0), values.len() as u64, blocks.address(0));
        let wanted = values.len().div_ceil(WIDTH * THREADS as usize);
        let count = u32::try_from(wanted).unwrap_or(BLOCKS).clamp(1, BLOCKS);
        let launch = Launch::fixed(Kernel::Inspect, (count, THREADS));
        let launch = launch.argument(&from).argument(&len).argument(&to);
        // SAFETY: CU-5, so many elements are read, and one `Seen` a block is written.
        unsafe { launch.issue(self, (&[values], &mut [&mut blocks])) }?;
        let (from, to) = (blocks.address(0), seen.address(2 * at));
        let count = u64::from(count);
        let launch = Launch::fixed(Kernel::InspectBlocks, (1, BLOCKS));
        let launch = launch.argument(&from).argument(&count).argument(&to);
        // SAFETY: CU-5, one `Seen` a block is read, and one written.
        unsafe { launch.issue(self, (&[&blocks], &mut [seen])) }
    }
}
