//! Placing parameters at a given shard length.
//!
//! All lengths here are in blocks of [`ALIGNMENT`] elements: starts and shard boundaries are
//! multiples of a block, so a cut at an element is possible only where it is one at a block.

use super::ALIGNMENT;
use crate::Param;

/// A parameter, as far as its place is concerned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Its length, rounded up. At least 1.
    pub(super) blocks: u64,
    /// Where it may be cut: at multiples of this, counted from its start. At least 1, at most
    /// `blocks`.
    pub(super) chunk: u64,
}

/// Where all parameters of a region lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
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

    /// The first place at or after `cursor` where it may lie when shards are `shard` blocks long.
    fn start(self, cursor: u64, shard: u64) -> Option<u64> {
        let room = shard - cursor % shard;
        if self.blocks <= room {
            return Some(cursor);
        }
        if shard.is_multiple_of(self.chunk) {
            // Any number of boundaries will do, once the first is a cut.
            return Some(cursor + room % self.chunk);
        }
        // Only one boundary may lie inside: the next one, with as much before it as may be cut off
        // there (perhaps nothing), or else the one after it.
        let rest_fits = |head: u64| self.blocks - head <= shard;
        let head = room - room % self.chunk;
        if rest_fits(head) {
            return Some(cursor + room - head);
        }
        let head = shard - shard % self.chunk;
        rest_fits(head).then(|| cursor + room + shard - head)
    }
}

/// Whether `shards` shards of `shard` blocks hold all parameters, each as early as it may be. As
/// early as possible is best: it leaves every later parameter at least the places that it would
/// have otherwise.
pub(super) fn fits(extents: &[Extent], shards: u64, shard: u64) -> bool {
    let end = extents.iter().try_fold(0, |cursor, extent| {
        extent.start(cursor, shard).map(|start| start + extent.blocks)
    });
    end.is_some_and(|end| end.div_ceil(shard) <= shards)
}

/// The placement at a shard length that [`fits`].
pub(super) fn place(extents: &[Extent], shard_blocks: u64) -> Placement {
    let mut cursor = 0;
    let starts = extents.iter().map_while(|extent| {
        let start = extent.start(cursor, shard_blocks)?;
        cursor = start + extent.blocks;
        Some(start)
    });
    Placement { starts: starts.collect(), shard_blocks }
}

pub(super) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
