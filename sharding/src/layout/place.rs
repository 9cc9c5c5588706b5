//! Placing parameters at a given shard length.
//!
//! All lengths here are in blocks of [`ALIGNMENT`] elements. Starts and shard boundaries are
//! multiples of a block, so a parameter can be cut only between two blocks.

use super::ALIGNMENT;
use crate::Param;
use crate::multiples::gcd;

/// The length of a parameter, and where it may be cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Its length, rounded up. At least 1.
    pub(super) blocks: u64,
    /// It may be cut at multiples of this, counted from its start. At least 1, at most `blocks`.
    pub(super) chunk: u64,
}

/// The places of all parameters of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ParamPlacing {
    /// Length of a shard.
    pub(super) shard_blocks: u64,
    /// First block of each parameter.
    pub(super) starts: Vec<u64>,
}

impl Extent {
    pub(super) fn of(param: &Param) -> Self {
        let alignment = ALIGNMENT as u64;
        let blocks = (param.numel() as u64).div_ceil(alignment);
        // A cut is a multiple of the row group and of the alignment: of their least common
        // multiple.
        let rows = param.chunk() as u64;
        let chunk = rows / gcd(rows, alignment);
        // A chunk as long as the parameter, or longer, means the same: it cannot be cut.
        Self { blocks, chunk: chunk.min(blocks) }
    }

    /// The first block at or after `cursor` at which it may start when shards are `shard` blocks
    /// long.
    fn start(self, cursor: u64, shard: u64) -> Option<u64> {
        let room = shard - cursor % shard;
        if self.blocks <= room {
            return Some(cursor);
        }
        if shard.is_multiple_of(self.chunk) {
            // Every boundary after the first is a valid cut if the first one is.
            return Some(cursor + room % self.chunk);
        }
        // Only one boundary may lie inside the parameter: the next one, with the longest valid head
        // (perhaps empty) before it, or else the boundary after that.
        let rest_fits = |head: u64| self.blocks - head <= shard;
        let head = room - room % self.chunk;
        if rest_fits(head) {
            return Some(cursor + room - head);
        }
        let head = shard - shard % self.chunk;
        rest_fits(head).then(|| cursor + room + shard - head)
    }
}

/// Whether `shards` shards of `shard` blocks hold all parameters, each placed as early as possible.
/// The earliest place is the best one: it takes no possible place from a later parameter.
pub(super) fn fits(extents: &[Extent], shards: u64, shard: u64) -> bool {
    let end = extents.iter().try_fold(0, |cursor, extent| {
        extent.start(cursor, shard).map(|start| start + extent.blocks)
    });
    end.is_some_and(|end| end.div_ceil(shard) <= shards)
}

/// The placement at a shard length that [`fits`].
pub(super) fn place(extents: &[Extent], shard_blocks: u64) -> ParamPlacing {
    let mut cursor = 0;
    let starts = extents.iter().map_while(|extent| {
        let start = extent.start(cursor, shard_blocks)?;
        cursor = start + extent.blocks;
        Some(start)
    });
    ParamPlacing { starts: starts.collect(), shard_blocks }
}
