//! The places of an optimizer's state: of this rank's pieces of the parameters that the optimizer updates, one after the other.

use std::ops::Range;

use hsdp_sharding::{ALIGNMENT, ParamId, Piece, Role, UnitId};

use crate::optimizer::pieces::trained_pieces;
use crate::state::context::Context;

/// The places of the state of one kind, the same for all kinds of an optimizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Places {
    units: Vec<UnitPlaces>,
    /// The elements of a parameter for which there is one value.
    block: usize,
}

/// The way in which values of state lie in a buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    /// The elements of a parameter for which there is one value.
    pub(super) block: usize,
    /// Pieces begin at multiples of this number of values.
    pub(super) quantum: usize,
}

impl Packing {
    /// A value for each element. Vector loads are aligned.
    pub(super) const ELEMENTS: Self = Self { block: 1, quantum: ALIGNMENT };
}

/// The places in the buffer of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct UnitPlaces {
    /// By parameter: whether the optimizer updates it.
    has: Vec<bool>,
    /// By parameter: the place of this rank's piece, if it has one.
    pieces: Vec<Option<Place>>,
    /// The values in the buffer.
    len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    /// The first value in the buffer.
    state: usize,
    /// The first element in the parameter.
    param: usize,
}

impl Places {
    /// The places of the parameters that `has` selects.
    pub(super) fn of(context: &Context, packing: Packing, has: impl Fn(ParamId) -> bool) -> Self {
        let of_unit = |unit: UnitId| {
            let params = &context.plan.spec()[unit].params;
            let is_ours = |index| has(ParamId { unit, index });
            let has = params.iter().enumerate();
            let has = has.map(|(index, it)| it.role == Role::Trainable && is_ours(index)).collect();
            let places = UnitPlaces { has, pieces: vec![None; params.len()], len: 0 };
            trained_pieces(context, unit).fold(places, |places, piece| places.with(&piece, packing))
        };
        let units = context.plan.spec().unit_ids().map(of_unit).collect();
        Self { units, block: packing.block }
    }

    /// Whether the optimizer updates a parameter.
    pub(super) fn has(&self, parameter: ParamId) -> bool {
        self.units[parameter.unit.index()].has[parameter.index]
    }

    /// The parameters that the optimizer updates, in the order of the model.
    pub(super) fn parameters(&self) -> impl Iterator<Item = ParamId> {
        self.units.iter().enumerate().flat_map(|(unit, places)| {
            let has = places.has.iter().enumerate().filter(|(_, has)| **has);
            has.map(move |(index, _)| ParamId { unit: UnitId::new(unit), index })
        })
    }

    /// The values in each unit's buffer.
    pub(super) fn lens(&self) -> impl Iterator<Item = usize> {
        self.units.iter().map(|unit| unit.len)
    }

    /// The place of a piece of this rank's shard, or of a part of one.
    pub(super) fn of_piece(&self, unit: UnitId, piece: &Piece) -> Range<usize> {
        self.of_range(ParamId { unit, index: piece.param }, piece.param_range())
    }

    /// The place of elements of a parameter that lie in this rank's shard.
    pub(super) fn of_range(&self, parameter: ParamId, range: Range<usize>) -> Range<usize> {
        let place = self.units[parameter.unit.index()].pieces[parameter.index];
        let place = place.expect("the optimizer has state of the pieces that it updates");
        let start = place.state + (range.start - place.param) / self.block;
        start..start + range.len().div_ceil(self.block)
    }
}

impl UnitPlaces {
    fn with(mut self, piece: &Piece, Packing { block, quantum }: Packing) -> Self {
        if self.has[piece.param] {
            self.pieces[piece.param] = Some(Place { state: self.len, param: piece.param_start });
            self.len += piece.len.div_ceil(block).next_multiple_of(quantum);
        }
        self
    }
}
