//! The optimizer state that a rank keeps and writes.

use std::ops::Range;

use super::by_shard::{ByShard, cut};
use super::saved::clipped;
use super::{Owners, Plan, Wholes};
use crate::{
    ALIGNMENT, ByteCount, Coordinate, DType, ElemCount, Param, ParamId, Piece, Rank, Role, State,
    UnitId, balanced,
};

const F32: u64 = 4;

/// The trainable parameters.
pub(super) fn trainable(plan: &Plan) -> impl Iterator<Item = (ParamId, &Param)> {
    plan.spec().params().filter(|(_, param)| param.role == Role::Trainable)
}

/// The bytes of optimizer state by shard index.
pub(super) fn by_shard(plan: &Plan) -> ByShard {
    let of_pieces = trainable(plan).flat_map(|(id, param)| {
        let layout = plan.layout(id.unit);
        let range = layout.params()[id.index].range();
        let pieces = cut(range, layout.trainable().shard_len);
        pieces.map(|(shards, len)| (shards, of_piece(param, len)))
    });
    let of_all = trainable(plan)
        .map(|(_, param)| (0..plan.mesh().shard_size(), F32 * rows_and_columns(param) as u64));
    let of_averages = plan.layouts().iter().map(|layout| {
        let trainable = layout.trainable().shard_len * plan.spec().averages();
        (0..plan.mesh().shard_size(), F32 * trainable as u64)
    });
    let owners = owners(plan);
    let of_owners = owners
        .owned()
        .map(|(owner, whole)| (owner..owner + 1, F32 * owned(&plan.spec()[whole.param])));
    ByShard::sums(of_pieces.chain(of_all).chain(of_averages).chain(of_owners))
}

/// The bytes of state that a rank keeps for a piece of this many elements.
fn of_piece(param: &Param, len: usize) -> u64 {
    let padded = len.next_multiple_of(ALIGNMENT) as u64;
    match param.state {
        State::EightBit { block } => 2 * padded + 2 * F32 * len.div_ceil(block) as u64,
        _ => F32 * slots(param) * padded,
    }
}

/// The f32 of state for each element of a piece.
fn slots(param: &Param) -> u64 {
    match param.state {
        State::Elements(slots) => slots as u64,
        State::Factored if param.shape.len() < 2 => 1,
        State::Muon => 1,
        State::Factored | State::EightBit { .. } | State::Owned(_) => 0,
    }
}

/// The rows and columns of all matrices of the last two dims, where each has an f32.
pub(super) fn rows_and_columns(param: &Param) -> usize {
    match (param.state, &param.shape[..]) {
        (State::Factored, [dims @ .., rows, columns]) => {
            dims.iter().product::<usize>() * (rows + columns)
        }
        _ => 0,
    }
}

/// The f32 that the owner of the parameter keeps.
fn owned(param: &Param) -> u64 {
    match param.state {
        State::Owned(words) => words as u64,
        _ => 0,
    }
}

/// The owners of the parameters with an owned state.
fn owners(plan: &Plan) -> Owners {
    let is_owned = |id: ParamId| matches!(plan.spec()[id].state, State::Owned(_));
    Owners::of(plan, Wholes::Parameters, is_owned).expect("every parameter is one of the wholes")
}

/// The bytes of a copy of the parameters and of the optimizer state that a rank writes.
pub(super) fn snapshot(plan: &Plan, rank: Rank) -> ByteCount {
    let (mesh, Coordinate { replicate_index, shard_index }) =
        (plan.mesh(), plan.mesh().coordinate(rank));
    let of_unit = |unit: UnitId| {
        let layout = plan.layout(unit);
        let part = balanced(layout.shard_len(), mesh.replicate_size(), replicate_index);
        let params = &plan.spec()[unit].params;
        let averages = plan.spec().averages() as u64;
        let written = |piece: Piece| copied((&params[piece.param], averages), piece, &part);
        layout.pieces(shard_index).map(written).sum::<u64>()
    };
    let of_pieces: u64 = plan.spec().unit_ids().map(of_unit).sum();
    match replicate_index {
        0 => ByteCount(of_pieces + of_first_replica(plan, shard_index)),
        _ => ByteCount(of_pieces),
    }
}

/// The bytes of the part of a piece, of its state, and of its averages, that lies in a range of the shard.
fn copied((param, averages): (&Param, u64), piece: Piece, part: &Range<usize>) -> u64 {
    let Some(within) = clipped(piece, part) else { return 0 };
    let values = ElemCount::of(within.len).bytes(DType::F32).get();
    let start = within.param_start - piece.param_start;
    match (param.role, param.state) {
        (Role::Frozen, _) => values,
        (Role::Trainable, State::EightBit { block }) => {
            let blocks = (start + within.len).div_ceil(block) - start.div_ceil(block);
            values * (3 + averages) + 2 * F32 * blocks as u64
        }
        (Role::Trainable, _) => values * (1 + slots(param) + averages),
    }
}

/// The bytes of the states that belong to no piece: those of owned parameters, and the rows and columns of the parameters whose
/// first element lies in the shard.
fn of_first_replica(plan: &Plan, shard_index: usize) -> u64 {
    let begins = |unit: UnitId| {
        let params = &plan.spec()[unit].params;
        let pieces = plan.layout(unit).pieces(shard_index).filter(|piece| piece.param_start == 0);
        pieces.map(|piece| &params[piece.param]).filter(|param| param.role == Role::Trainable)
    };
    let factors: usize = plan.spec().unit_ids().flat_map(begins).map(rows_and_columns).sum();
    let owners = owners(plan);
    let own = owners.owned().filter(|(owner, _)| *owner == shard_index);
    let words: u64 = own.map(|(_, whole)| owned(&plan.spec()[whole.param])).sum();
    F32 * (factors as u64 + words)
}
