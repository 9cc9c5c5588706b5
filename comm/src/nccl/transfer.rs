//! The buffers that one call of NCCL reads and writes.

use std::ops::Range;

use hsdp_kernels::cuda::DeviceBuffer;

/// Some elements of a buffer.
pub(crate) type Part<'a> = (&'a DeviceBuffer, Range<usize>);

/// The buffers that a member's part of a call reads and writes.
#[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "only NCCL reads it"))]
pub(crate) struct Transfer<'a> {
    /// The buffer that is read; `None` where it is the one that is written.
    pub(crate) from: Option<Part<'a>>,
    pub(crate) to: (&'a mut DeviceBuffer, Range<usize>),
}
