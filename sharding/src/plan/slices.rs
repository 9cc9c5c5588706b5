//! Slices of the trainable part of a shard, one for each replica.

use std::ops::Range;

use super::Plan;
use crate::multiples::lcm;
use crate::{Param, Piece, Rank, UnitId, balanced};

/// Starts of slices are multiples of this number of elements: 16 bytes in a 16-bit dtype, which a
/// vector load of a device takes.
const SLICE_ALIGNMENT: usize = 8;

/// Returns the slice of a rank in the shard that it holds of a unit.
pub(super) fn slice(plan: &Plan, unit: UnitId, rank: Rank) -> Range<usize> {
    let place = plan.mesh().coordinate(rank);
    let len = plan.layout(unit).trainable().shard_len;
    let blocks =
        balanced(len / SLICE_ALIGNMENT, plan.mesh().replicate_size(), place.replicate_index);
    let cut = |block: usize| cut_near(plan, unit, place.shard_index, block * SLICE_ALIGNMENT);
    cut(blocks.start)..cut(blocks.end)
}

/// Returns the place nearest to `at` where a unit's shard may be cut. If two are equally near, it
/// is the later one.
fn cut_near(plan: &Plan, unit: UnitId, shard_index: usize, at: usize) -> usize {
    let mut pieces = plan.layout(unit).pieces(shard_index);
    let Some(piece) = pieces.find(|piece| piece.shard_range().contains(&at)) else { return at };
    let Piece { param, len, shard_start, .. } = piece;
    // A chunk that no usize counts is longer than the piece.
    let chunk = usize::try_from(chunk(&plan.spec()[unit].params[param])).unwrap_or(usize::MAX);
    let at = at - shard_start;
    let before = at - at % chunk;
    let behind = before.saturating_add(chunk).min(len.next_multiple_of(SLICE_ALIGNMENT));
    shard_start + if at - before < behind - at { before } else { behind }
}

/// Returns the distance between two places where a piece may be cut, from its start on: the least
/// common multiple of the row group or block of the parameter, of the block of its state, and of
/// the alignment. Pieces begin where parameters may be cut.
fn chunk(param: &Param) -> u64 {
    let block = param.state.block().unwrap_or(1) as u64;
    lcm(lcm(param.chunk() as u64, block), SLICE_ALIGNMENT as u64)
}
