//! The pieces of parameters that a rank holds, and the pieces that it saves.

use std::ops::Range;

use super::Plan;
use crate::{Coordinate, Piece, Rank, UnitId, balanced};

/// The pieces that lie in `part` of each unit's shard.
pub(super) fn pieces_in(
    plan: &Plan,
    rank: Rank,
    part: impl Fn(usize) -> Range<usize>,
) -> Vec<(UnitId, Piece)> {
    let shard_index = plan.mesh().coordinate(rank).shard_index;
    let mut pieces = Vec::new();
    for unit in plan.spec().unit_ids() {
        let layout = plan.layout(unit);
        let part = part(layout.shard_len());
        let within = layout.pieces(shard_index).filter_map(|piece| clipped(piece, &part));
        pieces.extend(within.map(|piece| (unit, piece)));
    }
    pieces
}

/// The part of a piece that lies in a range of the shard; `None` if the two do not overlap.
pub(super) fn clipped(piece: Piece, part: &Range<usize>) -> Option<Piece> {
    let all = piece.shard_range();
    let (start, end) = (all.start.max(part.start), all.end.min(part.end));
    (start < end).then(|| Piece {
        param_start: piece.param_start + start - all.start,
        shard_start: start,
        len: end - start,
        ..piece
    })
}

pub(super) fn saved_by(plan: &Plan, rank: Rank) -> Vec<(UnitId, Piece)> {
    let mesh = plan.mesh();
    let Coordinate { replicate_index, .. } = mesh.coordinate(rank);
    pieces_in(plan, rank, |len| balanced(len, mesh.replicate_size(), replicate_index))
}
