//! What one call of NCCL reads and writes.

use std::ops::Range;

use hsdp_kernels::cuda::DeviceBuffer;

/// Some elements of a buffer.
pub(crate) type Part<'a> = (&'a DeviceBuffer, Range<usize>);

/// What a member's part of a call reads and writes.
#[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "only NCCL reads it"))]
pub(crate) struct Transfer<'a> {
    /// What is read; `None` where it is what is written.
    pub(crate) from: Option<Part<'a>>,
    pub(crate) to: (&'a mut DeviceBuffer, Range<usize>),
}
