//! The optimizer state that a rank keeps and writes, the sums of an update with factored state, and
//! the pieces of parameters that a rank holds and saves.

use std::ops::Range;

use super::{Flow, Owners, Plan, WholeMatrix, Wholes};
use crate::{
    ALIGNMENT, BufferId, ByteCount, Coordinate, DType, ElemCount, Param, ParamId, Piece, Rank,
    Role, State, UnitId, balanced,
};

const F32: u64 = 4;

/// The trainable parameters.
pub(super) fn trainable(plan: &Plan) -> impl Iterator<Item = (ParamId, &Param)> {
    plan.spec().params().filter(|(_, param)| param.role == Role::Trainable)
}

/// Returns the bytes of optimizer state that a rank keeps for the elements of a unit that it
/// updates, and for their averages.
pub(super) fn of_unit(plan: &Plan, unit: UnitId, rank: Rank) -> u64 {
    let params = &plan.spec()[unit].params;
    let pieces = plan.updated_pieces(unit, rank);
    let of_pieces: u64 = pieces.map(|piece| of_piece(&params[piece.param], piece.len)).sum();
    of_pieces + F32 * (plan.spec().averages() * plan.updated(unit, rank).len()) as u64
}

/// Returns the bytes of optimizer state that belong to no element, each with the updaters that keep
/// them.
pub(super) fn of_parameters(plan: &Plan) -> impl Iterator<Item = (Range<usize>, u64)> {
    let factors = trainable(plan).map(|(_, param)| F32 * rows_and_columns(param) as u64);
    let of_owner = |(owner, words)| (owner..owner + 1, F32 * words);
    factors.map(|bytes| (0..plan.updaters(), bytes)).chain(owned_words(plan).map(of_owner))
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
fn rows_and_columns(param: &Param) -> usize {
    match (param.state, &param.shape[..]) {
        (State::Factored, [dims @ .., rows, columns]) => {
            dims.iter().product::<usize>() * (rows + columns)
        }
        _ => 0,
    }
}

/// Returns the owner of each parameter with an owned state, by its index among the updaters, and
/// the number of f32 that it keeps.
fn owned_words(plan: &Plan) -> impl Iterator<Item = (usize, u64)> {
    let words = |id: ParamId| match plan.spec()[id].state {
        State::Owned(words) => Some(words as u64),
        _ => None,
    };
    let owners = Owners::of(plan, Wholes::Parameters, |id| words(id).is_some());
    let owners = owners.expect("every parameter is one of the wholes");
    let of_whole = |(owner, whole): (usize, &WholeMatrix)| Some((owner, words(whole.param)?));
    owners.owned().filter_map(of_whole).collect::<Vec<_>>().into_iter()
}

/// The bytes of a copy of the parameters, of the optimizer state and of the buffers that a rank
/// writes.
pub(super) fn snapshot(plan: &Plan, rank: Rank) -> ByteCount {
    let averages = plan.spec().averages() as u64;
    let written = |part: SavedPart| {
        let SavedPart { unit, piece, within } = part;
        let param = &plan.spec()[unit].params[piece.param];
        let of_piece = copied(param, averages, within.param_start - piece.param_start, within.len);
        match (param.role, within.param_start) {
            (Role::Trainable, 0) => of_piece + F32 * rows_and_columns(param) as u64,
            _ => of_piece,
        }
    };
    let of_pieces: u64 = parts_saved_by(plan, rank).map(written).sum();
    // Replicas whose updates are the same have owners with the same state. The first one writes it,
    // and the numbers of its ranks are their indices among the updaters.
    let own = owned_words(plan).filter(|(owner, _)| *owner == rank.index());
    let of_owner: u64 = own.map(|(_, words)| F32 * words).sum();
    ByteCount(of_pieces + of_owner) + of_buffers(plan, rank)
}

/// Returns the bytes of the buffers that a rank writes, and of their averages.
fn of_buffers(plan: &Plan, rank: Rank) -> ByteCount {
    let numel = buffers_saved_by(plan, rank).map(|(_, buffer)| ElemCount::of(buffer.numel()));
    numel.sum::<ElemCount>().bytes(DType::F32) * (1 + plan.spec().averages() as u64)
}

/// Returns the buffers that a rank writes: the ranks take them in turn, in declared order.
pub(super) fn buffers_saved_by(
    plan: &Plan,
    rank: Rank,
) -> impl Iterator<Item = (BufferId, &Param)> {
    let ranks = plan.mesh().world_size();
    assert!(rank.index() < ranks, "rank {rank} is not in the mesh {}", plan.mesh());
    plan.spec().buffers().skip(rank.index()).step_by(ranks)
}

/// Returns the bytes of `len` elements of a piece from `start` on, of their state, and of their
/// averages.
fn copied(param: &Param, averages: u64, start: usize, len: usize) -> u64 {
    let values = ElemCount::of(len).bytes(DType::F32).get();
    match (param.role, param.state) {
        (Role::Frozen, _) => values,
        (Role::Trainable, State::EightBit { block }) => {
            let blocks = (start + len).div_ceil(block) - start.div_ceil(block);
            values * (3 + averages) + 2 * F32 * blocks as u64
        }
        (Role::Trainable, _) => values * (1 + slots(param) + averages),
    }
}

/// The values of the two all-reduces, in f64. Each has a value for each parameter; the first also
/// has one for each row and each column.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FactoredSums {
    parameters: usize,
    rows_and_columns: usize,
}

impl FactoredSums {
    pub(super) fn of(plan: &Plan) -> Self {
        let factored = trainable(plan).filter(|(_, param)| param.state == State::Factored);
        factored.fold(Self::default(), |sums, (_, param)| Self {
            parameters: sums.parameters + 1,
            rows_and_columns: sums.rows_and_columns + rows_and_columns(param),
        })
    }

    /// The memory of the sums, and of the factors after the update until it is certain.
    pub(super) fn extra(self) -> ByteCount {
        let sums = ElemCount::of(2 * self.parameters + self.rows_and_columns);
        sums.bytes(DType::F64) + self.staged()
    }

    /// The memory of the factors after the update.
    pub(super) fn staged(self) -> ByteCount {
        ElemCount::of(self.rows_and_columns).bytes(DType::F32)
    }

    /// Returns the all-reduces of a rank, over the world.
    pub(super) fn flow(self, plan: &Plan, rank: Rank) -> Flow {
        let ranks = plan.mesh().world_size();
        if self.parameters == 0 || ranks == 1 {
            return Flow::NONE;
        }
        let values = [self.parameters + self.rows_and_columns, self.parameters];
        let received = values.map(|len| {
            let own = balanced(len, ranks, rank.index()).len();
            ElemCount::of(own) * (ranks as u64 - 1) + ElemCount::of(len - own)
        });
        Flow { calls: 2, bytes: received.into_iter().sum::<ElemCount>().bytes(DType::F64) }
    }
}

/// Returns the pieces of a rank, by unit.
pub(super) fn pieces_of(plan: &Plan, rank: Rank) -> Vec<(UnitId, Piece)> {
    let shard_index = plan.mesh().coordinate(rank).shard_index;
    let of_unit = |unit| plan.layout(unit).pieces(shard_index).map(move |piece| (unit, piece));
    plan.spec().unit_ids().flat_map(of_unit).collect()
}

pub(super) fn saved_by(plan: &Plan, rank: Rank) -> Vec<(UnitId, Piece)> {
    parts_saved_by(plan, rank).map(|part| (part.unit, part.within)).collect()
}

/// Part of a piece that a rank saves.
struct SavedPart {
    unit: UnitId,
    /// The whole piece.
    piece: Piece,
    /// The part, as a piece.
    within: Piece,
}

fn parts_saved_by(plan: &Plan, rank: Rank) -> impl Iterator<Item = SavedPart> {
    let mesh = plan.mesh();
    let Coordinate { replicate_index, shard_index } = mesh.coordinate(rank);
    let of_unit = move |unit: UnitId| {
        let layout = plan.layout(unit);
        let trainable = plan.slice(unit, rank);
        let start = layout.trainable().shard_len;
        let frozen = balanced(layout.frozen().shard_len, mesh.replicate_size(), replicate_index);
        let frozen = start + frozen.start..start + frozen.end;
        layout.pieces(shard_index).filter_map(move |piece| {
            let of_role = if piece.shard_start < start { &trainable } else { &frozen };
            Some(SavedPart { unit, piece, within: clipped(piece, of_role)? })
        })
    };
    plan.spec().unit_ids().flat_map(of_unit)
}

/// Returns the part of a piece that lies in a range of the shard; `None` if the two do not overlap.
pub(super) fn clipped(piece: Piece, part: &Range<usize>) -> Option<Piece> {
    let all = piece.shard_range();
    let start = all.start.max(part.start);
    let end = all.end.min(part.end);
    (start < end).then(|| Piece {
        param_start: piece.param_start + start - all.start,
        shard_start: start,
        len: end - start,
        ..piece
    })
}
