//! The buffers of one call of NCCL.

use std::ops::Range;

use hsdp_kernels::cuda::DeviceBuffer;

/// Some elements of a buffer.
pub(crate) type Part<'a> = (&'a DeviceBuffer, Range<usize>);

/// The buffers of a member's part of a call.
#[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "only NCCL reads it"))]
pub(crate) struct Transfer<'a> {
    /// The elements that are read; `None` if they are those that are written.
    pub(crate) from: Option<Part<'a>>,
    pub(crate) to: (&'a mut DeviceBuffer, Range<usize>),
}
