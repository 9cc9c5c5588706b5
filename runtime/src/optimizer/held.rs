//! The state of an optimizer: several kinds, each an f32 for each element that it updates, and the number of updates.

use std::borrow::Cow;
use std::ops::Range;

use hsdp_sharding::{ParamId, Piece, UnitId};

use crate::error::Error;
use crate::optimizer::covered::Covered;
use crate::optimizer::method::Kept;
use crate::optimizer::pieces::trained_pieces;
use crate::persist::checkpointed::{Spread, StateTensor};
use crate::persist::problem::Problem;
use crate::persist::saved::StateSource;
use crate::state::context::{Context, ErrorSite};
use crate::state::store::Store;

/// The kinds of state of an optimizer, such as `exp_avg`.
pub(super) type Kinds = &'static [&'static str];

/// The state of an optimizer.
#[derive(Debug)]
pub(super) struct Held {
    kinds: Kinds,
    pub(super) covered: Covered,
    /// By kind and unit.
    pub(super) states: Vec<Vec<Store>>,
}

impl Held {
    pub(super) fn zeros(
        site: ErrorSite<'_>,
        kinds: Kinds,
        has: impl Fn(ParamId) -> bool,
    ) -> Result<Self, Error> {
        let covered = Covered::of(site.context, has);
        let states = kinds.iter().map(|_| Store::zeros(&site, covered.places.lens()));
        let states = states.collect::<Result<_, _>>()?;
        Ok(Self { kinds, covered, states })
    }

    /// Returns a unit's state of a kind; `None` if there is no such kind, or none of a parameter.
    fn kind(&self, kind: &str, parameter: ParamId) -> Option<&Store> {
        let kind = self.kinds.iter().position(|it| *it == kind)?;
        let has = self.covered.places.has(parameter);
        has.then(|| &self.states[kind][parameter.unit.index()])
    }

    /// The only kind of state of a run of elements, on the host.
    ///
    /// # Panics
    /// If the state lies on a device.
    pub(super) fn host(&mut self, unit: UnitId, piece: &Piece) -> &mut [f32] {
        let place = self.covered.places.of_piece(unit, piece);
        &mut self.states[0][unit.index()].here_mut()[place]
    }

    /// The same, to read.
    ///
    /// # Panics
    /// If the state lies on a device.
    pub(super) fn of_host(&self, unit: UnitId, piece: &Piece) -> &[f32] {
        &self.states[0][unit.index()].here()[self.covered.places.of_piece(unit, piece)]
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
        let Some(state) = self.kind(kind, parameter) else { return Ok(None) };
        let place = self.covered.places.of_range(parameter, range);
        state.to_host(&context.site("saving", 0), place).map(Some)
    }

    fn copy_elements(
        &self,
        context: &Context,
        (kind, parameter): (&str, ParamId),
        (start, into): (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        let Some(state) = self.kind(kind, parameter) else { return Ok(false) };
        let place = self.covered.places.of_range(parameter, start..start + into.len());
        state.copy_to(&context.site("saving", 0), place.start, into)?;
        Ok(true)
    }

    fn read(&mut self, context: &Context, saved: &dyn StateSource) -> Result<(), Problem> {
        let Self { kinds, covered, states } = self;
        let places = &covered.places;
        let site = context.site("loading", 0);
        for (stores, kind) in states.iter_mut().zip(*kinds) {
            for (unit, store) in context.plan.spec().unit_ids().zip(stores) {
                let id = |piece: &Piece| ParamId { unit, index: piece.param };
                let mut pieces =
                    trained_pieces(context, unit).filter(|piece| places.has(id(piece)));
                store.fill(&site, |values| {
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
