//! The blocks of a work whose parts have one length.

use std::ops::Range;

/// Parts of one length, each of which is cut into blocks. The blocks cover all parts once.
pub(super) struct Cuts {
    /// Elements of a part.
    pub(super) len: usize,
    /// Elements of a block, but for the last one of a part.
    pub(super) block_len: usize,
}

impl Cuts {
    /// The number of blocks of each part.
    pub(super) fn each(&self) -> usize {
        self.len.div_ceil(self.block_len)
    }

    /// The part to which a block belongs, and the elements of the block in it.
    pub(super) fn block(&self, block: usize) -> (usize, Range<usize>) {
        let start = block % self.each() * self.block_len;
        (block / self.each(), start..self.len.min(start + self.block_len))
    }
}
