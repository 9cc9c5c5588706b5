//! Buffers that a call fills: whole in the hands of their owner, in parts while blocks fill them.

use std::ops::{Deref, DerefMut};

use hsdp_kernels::{DisjointBuffer, HostBuffer};

/// The buffers of a unit's parameters, lent to be filled. To gather again without allocating, lend the targets that the last
/// gather returned.
#[derive(Debug, Default)]
pub struct Targets {
    /// Empty while they are apart.
    whole: Vec<HostBuffer>,
    /// Empty while they are whole.
    apart: Vec<DisjointBuffer>,
}

impl Targets {
    /// Returns the buffers.
    #[must_use]
    pub fn into_buffers(self) -> Vec<HostBuffer> {
        self.whole
    }

    /// The list of buffers.
    pub fn buffers_mut(&mut self) -> &mut Vec<HostBuffer> {
        &mut self.whole
    }

    /// Has them filled in parts from now on.
    pub(crate) fn take_apart(&mut self) {
        self.apart.extend(self.whole.drain(..).map(DisjointBuffer::from));
    }

    /// While they are apart.
    pub(crate) fn apart(&self) -> &[DisjointBuffer] {
        &self.apart
    }

    /// They are filled.
    pub(crate) fn put_together(&mut self) {
        self.whole.extend(self.apart.drain(..).map(DisjointBuffer::into_buffer));
    }
}

impl Deref for Targets {
    type Target = [HostBuffer];

    fn deref(&self) -> &[HostBuffer] {
        &self.whole
    }
}

impl DerefMut for Targets {
    fn deref_mut(&mut self) -> &mut [HostBuffer] {
        &mut self.whole
    }
}

impl FromIterator<HostBuffer> for Targets {
    fn from_iter<I: IntoIterator<Item = HostBuffer>>(buffers: I) -> Self {
        Vec::from_iter(buffers).into()
    }
}

impl From<Vec<HostBuffer>> for Targets {
    fn from(whole: Vec<HostBuffer>) -> Self {
        Self { whole, apart: Vec::new() }
    }
}
