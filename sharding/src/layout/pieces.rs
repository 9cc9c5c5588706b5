//! The pieces of parameters that one shard holds.

use std::ops::Range;

use super::ParamSlot;

/// Consecutive elements of one parameter in one shard. Never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The parameter: its index in the unit.
    pub param: usize,
    /// The first element of the piece, counted from the parameter's start.
    pub param_start: usize,
    /// Number of elements.
    pub len: usize,
    /// The index of the first element in the `shard` buffer.
    pub shard_start: usize,
}

impl Piece {
    /// The range of elements in the parameter.
    #[must_use]
    pub const fn param_range(&self) -> Range<usize> {
        self.param_start..self.param_start + self.len
    }

    /// The range of the same elements in the `shard` buffer.
    #[must_use]
    pub const fn shard_range(&self) -> Range<usize> {
        self.shard_start..self.shard_start + self.len
    }
}

/// An iterator over the pieces of one shard, in the order of its buffer. Made by
/// [`UnitLayout::pieces`](super::UnitLayout::pieces).
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    slots: &'a [ParamSlot],
    trainable: PieceWindow<'a>,
    frozen: PieceWindow<'a>,
}

/// The pieces of one shard in one region.
#[derive(Clone, Debug)]
pub(super) struct PieceWindow<'a> {
    /// The parameters that overlap the slice.
    params: &'a [usize],
    /// The slice, in elements of `full`.
    slice: Range<usize>,
    /// The index of the slice's first element in the `shard` buffer.
    shard_start: usize,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(
        slots: &'a [ParamSlot],
        trainable: PieceWindow<'a>,
        frozen: PieceWindow<'a>,
    ) -> Self {
        Self { slots, trainable, frozen }
    }
}

impl<'a> PieceWindow<'a> {
    /// Takes the parameters of a region in the order of `full`, the shard's slice of the region,
    /// and the index at which the slice begins in the `shard` buffer.
    pub(super) fn new(
        slots: &[ParamSlot],
        params: &'a [usize],
        slice: Range<usize>,
        shard_start: usize,
    ) -> Self {
        let first = params.partition_point(|&param| slots[param].range().end <= slice.start);
        let last = params.partition_point(|&param| slots[param].start < slice.end);
        Self { params: &params[first..last], slice, shard_start }
    }

    fn next(&mut self, slots: &[ParamSlot]) -> Option<Piece> {
        let (&param, rest) = self.params.split_first()?;
        self.params = rest;
        let slot = &slots[param];
        let start = slot.start.max(self.slice.start);
        Some(Piece {
            param,
            param_start: start - slot.start,
            len: slot.range().end.min(self.slice.end) - start,
            shard_start: self.shard_start + (start - self.slice.start),
        })
    }
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        self.trainable.next(self.slots).or_else(|| self.frozen.next(self.slots))
    }
}
