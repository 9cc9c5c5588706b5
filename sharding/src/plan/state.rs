//! The optimizer state that a rank keeps and writes, the sums of an update with factored state, and
//! the pieces of parameters that a rank holds and saves.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Flow, Owners, Plan, Wholes};
use crate::{
    ALIGNMENT, BufferId, ByteCount, Coordinate, DType, ElemCount, Param, ParamId, Piece, Rank,
    Role, State, UnitId, balanced,
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
fn rows_and_columns(param: &Param) -> usize {
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

/// The bytes of a copy of the parameters, of the optimizer state and of the buffers that a rank
/// writes.
pub(super) fn snapshot(plan: &Plan, rank: Rank) -> ByteCount {
    let mesh = plan.mesh();
    let Coordinate { replicate_index, shard_index } = mesh.coordinate(rank);
    let averages = plan.spec().averages() as u64;
    let written = |part: SavedPart| {
        let SavedPart { unit, piece, within } = part;
        copied(
            &plan.spec()[unit].params[piece.param],
            averages,
            within.param_start - piece.param_start,
            within.len,
        )
    };
    let of_pieces: u64 = parts_saved_by(plan, rank).map(written).sum();
    let of_pieces = ByteCount(of_pieces) + of_buffers(plan, rank);
    match replicate_index {
        0 => of_pieces + ByteCount(of_first_replica(plan, shard_index)),
        _ => of_pieces,
    }
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

/// The bytes of the states that belong to no piece: those of owned parameters, and the rows and
/// columns of the parameters whose first element lies in the shard.
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

    /// The all-reduces of the rank at `shard_index`, one of `shards`.
    pub(super) fn flow(self, shard_index: usize, shards: usize) -> Flow {
        if self.parameters == 0 || shards == 1 {
            return Flow::NONE;
        }
        let values = [self.parameters + self.rows_and_columns, self.parameters];
        let received = values.map(|len| {
            let own = balanced(len, shards, shard_index).len();
            ElemCount::of(own) * (shards as u64 - 1) + ElemCount::of(len - own)
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

/// A number for each shard index. It is stored where it changes, so its size does not depend on the
/// number of shards.
#[derive(Clone, Debug, Default)]
pub(super) struct ByShard {
    /// The shard index from which on a number holds, ascending. Before the first the number is 0.
    runs: Vec<(usize, u64)>,
}

impl ByShard {
    /// Returns the sums of amounts by shard index. An amount counts for every shard index in its
    /// range. No sum may exceed `u64::MAX`.
    pub(super) fn sums(amounts: impl Iterator<Item = (Range<usize>, u64)>) -> Self {
        let mut changes = BTreeMap::<usize, u64>::new();
        for (shards, amount) in amounts.filter(|(shards, amount)| !shards.is_empty() && *amount > 0)
        {
            let start = changes.entry(shards.start).or_default();
            *start = start.wrapping_add(amount);
            let end = changes.entry(shards.end).or_default();
            *end = end.wrapping_sub(amount);
        }
        let mut sum = 0u64;
        let runs = changes.into_iter().map(|(shard_index, change)| {
            sum = sum.wrapping_add(change);
            (shard_index, sum)
        });
        Self { runs: runs.collect() }
    }

    /// The number of a shard index.
    pub(super) fn at(&self, shard_index: usize) -> u64 {
        match self.runs.partition_point(|(start, _)| *start <= shard_index) {
            0 => 0,
            behind => self.runs[behind - 1].1,
        }
    }

    /// The shard indices from which on the number may be another.
    pub(super) fn starts(&self) -> impl Iterator<Item = usize> {
        self.runs.iter().map(|(start, _)| *start)
    }

    /// The largest number of all.
    pub(super) fn most(&self) -> u64 {
        self.runs.iter().map(|(_, number)| *number).max().unwrap_or(0)
    }
}

/// The pieces into which shards of `shard_len` elements cut the range of a parameter in its region:
/// shard indices, and the number of elements that each of these shards has. There are a first
/// piece, whole shards, and a last piece, as far as they exist.
pub(super) fn cut(
    range: Range<usize>,
    shard_len: usize,
) -> impl Iterator<Item = (Range<usize>, usize)> {
    let first = range.start / shard_len;
    let last = (range.end - 1) / shard_len;
    let end = range.end.min((first + 1) * shard_len);
    let head = (first..first + 1, end - range.start);
    let whole = (first + 1..last, shard_len);
    let tail = (last.max(first + 1)..last + 1, range.end - last * shard_len);
    [head, whole, tail].into_iter().filter(|(shards, _)| !shards.is_empty())
}
