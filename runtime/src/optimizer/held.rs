//! The state of an optimizer: several kinds, each an f32 for each element that it updates, and the number of updates.

use std::borrow::Cow;
use std::ops::Range;

use hsdp_sharding::{ParamId, Piece, UnitId};

use crate::error::Error;
use crate::optimizer::covered::Covered;
use crate::optimizer::method::Kept;
use crate::optimizer::pieces::trained_pieces;
use crate::optimizer::state::{Of, State};
use crate::persist::problem::Problem;
use crate::persist::saved::Source;
use crate::persist::tensors::{Spread, StateTensor};
use crate::state::context::Context;

/// The kinds of state of an optimizer, such as `exp_avg`.
pub(super) type Kinds = &'static [&'static str];

/// The state of an optimizer.
#[derive(Debug)]
pub(super) struct Held {
    kinds: Kinds,
    pub(super) covered: Covered,
    /// By kind.
    pub(super) states: Vec<State>,
}

impl Held {
    pub(super) fn zeros(
        context: &Context,
        (kinds, of): (Kinds, Of),
        has: impl Fn(ParamId) -> bool,
    ) -> Result<Self, Error> {
        let covered = Covered::of(context, has);
        let states = kinds.iter().map(|_| State::zeros(context, covered.places.lens(), of));
        let states = states.collect::<Result<_, _>>()?;
        Ok(Self { kinds, covered, states })
    }

    fn kind(&self, kind: &str) -> Option<&State> {
        Some(&self.states[self.kinds.iter().position(|it| *it == kind)?])
    }

    /// The only kind of state of a run of elements, on the host.
    ///
    /// # Panics
    /// If the state lies on a device.
    pub(super) fn host(&mut self, unit: UnitId, piece: &Piece) -> &mut [f32] {
        let place = self.covered.places.of_piece(unit, piece);
        self.states[0].host(unit, place)
    }

    /// The same, to read.
    ///
    /// # Panics
    /// If the state lies on a device.
    pub(super) fn of_host(&self, unit: UnitId, piece: &Piece) -> &[f32] {
        self.states[0].of_host(unit, self.covered.places.of_piece(unit, piece))
    }
}

impl Kept for Held {
    fn covered(&self) -> &Covered {
        &self.covered
    }

    fn covered_mut(&mut self) -> &mut Covered {
        &mut self.covered
    }

    fn elements<'a>(
        &'a self,
        context: &Context,
        (kind, parameter): (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        let state = self.kind(kind).filter(|_| self.covered.places.has(parameter));
        let place = || (parameter.unit, self.covered.places.of_range(parameter, range));
        state.map(|state| state.read(context, place())).transpose()
    }

    fn copy_elements(
        &self,
        context: &Context,
        (kind, parameter): (&str, ParamId),
        (start, into): (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        let state = self.kind(kind).filter(|_| self.covered.places.has(parameter));
        let Some(state) = state else { return Ok(false) };
        let place = self.covered.places.of_range(parameter, start..start + into.len());
        state.copy_to(context, (parameter.unit, place.start), into)?;
        Ok(true)
    }

    fn read(&mut self, context: &Context, saved: &dyn Source) -> Result<(), Problem> {
        let Self { kinds, covered, states } = self;
        let places = &covered.places;
        for (state, kind) in states.iter_mut().zip(*kinds) {
            for unit in context.plan.spec().unit_ids() {
                let id = |piece: &Piece| ParamId { unit, index: piece.param };
                let mut pieces =
                    trained_pieces(context, unit).filter(|piece| places.has(id(piece)));
                state.fill(context, unit, |values| {
                    pieces.try_for_each(|piece| {
                        let into = &mut values[places.of_piece(unit, &piece)];
                        saved.read((kind, id(&piece)), piece.param_start, into)
                    })
                })?;
            }
        }
        Ok(())
    }
}

/// The tensors of these kinds of state of a parameter.
pub(super) fn tensors_of(kinds: Kinds, parameter: ParamId) -> Vec<StateTensor> {
    let spread = Spread::Elements;
    kinds.iter().map(|kind| StateTensor { kind, parameter, spread }).collect()
}
