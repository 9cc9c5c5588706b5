//! The squared norm of a buffer, and whether it is finite.

use std::time::Duration;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::launch::Launch;
use super::stream::Stream;

/// Blocks and threads of `inspect.cu`: the same on all devices, so that sums have one order.
const BLOCKS: u32 = 512;
const THREADS: u32 = 256;

/// Elements of f32 in what one block has seen.
const SEEN: usize = 4;

/// What was seen of some elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// The sum of their squares, in f64.
    pub squared_norm: f64,
    /// The index of the first that is infinite or NaN.
    pub first_non_finite: Option<u64>,
}

impl Stream {
    /// Sums up the squares of f32 elements and looks for one that is not finite, in one pass. Into `seen`: `[4]`, f32, which
    /// [`read_seen`](Self::read_seen) makes sense of. The order of additions is the same on all devices, and another than that of
    /// [`squared_norm`](crate::squared_norm). Two launches.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the buffers are not f32, or `seen` has not 4 elements; [`CudaError::OutOfMemory`];
    /// [`CudaError::Driver`].
    pub fn inspect(&self, values: &DeviceBuffer, seen: &mut DeviceBuffer) -> Result<(), CudaError> {
        values.check("inspect", DType::F32, values.len())?;
        seen.check("inspect", DType::F32, SEEN)?;
        let room = SEEN * BLOCKS as usize;
        let mut blocks =
            DeviceBuffer::new(self.device(), DType::F32, room, "what blocks have seen")?;
        let (from, len, to) = (values.address(0), values.len() as u64, blocks.address(0));
        let launch = Launch::fixed("inspect", (BLOCKS, THREADS));
        let launch = launch.argument(&from).argument(&len).argument(&to);
        // SAFETY: CU-5, so many elements are read, and one `Seen` a block is written.
        unsafe { launch.issue(self, (&[values], &mut [&mut blocks])) }?;
        let (from, to) = (blocks.address(0), seen.address(0));
        let launch = Launch::fixed("inspect_blocks", (1, BLOCKS)).argument(&from).argument(&to);
        // SAFETY: CU-5, one `Seen` a thread is read, and one written.
        unsafe { launch.issue(self, (&[&blocks], &mut [seen])) }
    }

    /// What [`inspect`](Self::inspect) wrote. Waits for it.
    ///
    /// # Errors
    /// [`CudaError::Late`] after `patience`; [`CudaError::Driver`].
    pub fn read_seen(&self, seen: &DeviceBuffer, patience: Duration) -> Result<Seen, CudaError> {
        seen.check("read what was seen", DType::F32, SEEN)?;
        let copy = seen.read_back(self, patience)?;
        let words = copy.values().to_f32();
        let bits =
            |at: usize| u64::from(words[at].to_bits()) | u64::from(words[at + 1].to_bits()) << 32;
        let first = bits(2);
        Ok(Seen {
            squared_norm: f64::from_bits(bits(0)),
            first_non_finite: (first != u64::MAX).then_some(first),
        })
    }
}
