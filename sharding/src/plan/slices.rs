//! The slices into which replicas divide the trainable part of a shard.

use std::ops::Range;

use super::Plan;
use crate::balance::lcm;
use crate::{ALIGNMENT, Piece, Rank, SLICE_BLOCK, UnitId, balanced};

/// Returns the slice of a rank in the shard that it holds of a unit.
pub(super) fn slice(plan: &Plan, unit: UnitId, rank: Rank) -> Range<usize> {
    let place = plan.mesh().coordinate(rank);
    let len = plan.layout(unit).trainable().shard_len;
    let blocks = balanced(len / ALIGNMENT, plan.mesh().replicate_size(), place.replicate_index);
    let cut = |block: usize| cut_near(plan, unit, place.shard_index, block * ALIGNMENT);
    cut(blocks.start)..cut(blocks.end)
}

/// Returns the place nearest to `at` where a shard of a unit may be cut, of two the first one.
fn cut_near(plan: &Plan, unit: UnitId, shard_index: usize, at: usize) -> usize {
    let mut pieces = plan.layout(unit).pieces(shard_index);
    let Some(piece) = pieces.find(|piece| piece.shard_range().contains(&at)) else { return at };
    let Piece { param, len, shard_start, .. } = piece;
    let chunk = lcm(plan.spec()[unit].params[param].chunk() as u64, SLICE_BLOCK as u64);
    // A chunk that no usize counts is longer than the piece.
    let chunk = usize::try_from(chunk).unwrap_or(usize::MAX);
    let at = at - shard_start;
    let before = at - at % chunk;
    let behind = before.saturating_add(chunk).min(len.next_multiple_of(ALIGNMENT));
    shard_start + if at - before <= behind - at { before } else { behind }
}
