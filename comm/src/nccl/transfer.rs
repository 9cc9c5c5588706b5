//! The buffers that one call of NCCL reads and writes.

use std::ops::Range;

use hsdp_kernels::cuda::DeviceBuffer;

/// The buffers that a member's part of a call reads and writes, with the range of each.
#[derive(Debug)]
pub struct Transfer<'a> {
    /// The buffer that is read; `None` where it is the one that is written.
    pub from: Option<(&'a DeviceBuffer, Range<usize>)>,
    /// The buffer that is written.
    pub to: (&'a mut DeviceBuffer, Range<usize>),
}

impl<'a> Transfer<'a> {
    /// Returns the transfer of all elements of these buffers.
    pub fn whole(from: Option<&'a DeviceBuffer>, to: &'a mut DeviceBuffer) -> Self {
        let all = 0..to.len();
        Self { from: from.map(|from| (from, 0..from.len())), to: (to, all) }
    }
}
