//! The state of an optimizer: several kinds, each an f32 for each element that it updates, and the number of updates.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;

use hsdp_sharding::{ParamId, Piece, UnitId};

use crate::checkpoint::{Problem, SavedState, Spread, StateTensor};
use crate::engine::fabric::Fabric;
use crate::error::Error;
use crate::optimizer::Updating;
use crate::optimizer::covered::Covered;
use crate::optimizer::pass::trained_pieces;
use crate::optimizer::state::{Of, State};

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
        fabric: &Fabric,
        (kinds, of): (Kinds, Of),
        has: impl Fn(ParamId) -> bool,
    ) -> Result<Self, Error> {
        let covered = Covered::of(fabric, has);
        let states = kinds.iter().map(|_| State::zeros(fabric, covered.places.lens(), of));
        let states = states.collect::<Result<_, _>>()?;
        Ok(Self { kinds, covered, states })
    }

    /// Makes the state of the parameters that an optimizer of this kind updates, or checks that they are those of which it has state.
    pub(super) fn of(
        held: &mut Option<Self>,
        updating: &Updating<'_>,
        (kind, kinds): (&str, Kinds),
    ) -> Result<(), Error> {
        match held {
            Some(held) if held.fits(kind, updating)? => Ok(()),
            _ => {
                let of = ("optimizer step", updating.gradients.step);
                *held = Some(Self::zeros(updating.fabric, (kinds, of), |id| updating.has(id))?);
                Ok(())
            }
        }
    }

    /// Whether this is the state of the parameters that are updated. An optimizer without state may update others than before.
    fn fits(&self, kind: &str, updating: &Updating<'_>) -> Result<bool, Error> {
        match self.covered.check(kind, updating) {
            Err(_) if self.states.is_empty() => Ok(false),
            checked => checked.map(|()| true),
        }
    }

    pub(super) fn tensors(&self) -> Vec<StateTensor> {
        tensors_of(self.kinds, self.covered.parameters())
    }

    fn kind(&self, kind: &str) -> Option<&State> {
        Some(&self.states[self.kinds.iter().position(|it| *it == kind)?])
    }

    /// Elements of one kind of state of a parameter, if there is such state.
    pub(super) fn state(
        &self,
        fabric: &Fabric,
        (kind, parameter): (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'_, [f32]>>, Error> {
        let state = self.kind(kind).filter(|_| self.covered.places.has(parameter));
        let place = || (parameter.unit, self.covered.places.of_range(parameter, range));
        state.map(|state| state.read(fabric, place())).transpose()
    }

    /// Copies elements of one kind of state of a parameter, if there is such state.
    pub(super) fn copy_state(
        &self,
        fabric: &Fabric,
        (kind, parameter): (&str, ParamId),
        (start, into): (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        let state = self.kind(kind).filter(|_| self.covered.places.has(parameter));
        let Some(state) = state else { return Ok(false) };
        let place = self.covered.places.of_range(parameter, start..start + into.len());
        state.copy_to(fabric, (parameter.unit, place.start), into)?;
        Ok(true)
    }

    /// The state in a checkpoint; `None` if it has no such state.
    pub(super) fn restored(
        fabric: &Fabric,
        (kinds, step): (Kinds, u64),
        saved: &SavedState<'_>,
    ) -> Result<Option<Self>, Problem> {
        let has: BTreeSet<ParamId> = saved.parameters_with(kinds).into_iter().collect();
        if has.is_empty() {
            return Ok(None);
        }
        let mut held = Self::zeros(fabric, (kinds, ("loading", step)), |id| has.contains(&id))?;
        held.read(fabric, saved)?;
        Ok(Some(held))
    }

    /// Reads the state of this rank's pieces.
    pub(super) fn read(&mut self, fabric: &Fabric, saved: &SavedState<'_>) -> Result<(), Problem> {
        let Self { kinds, covered, states } = self;
        covered.read(saved);
        let places = &covered.places;
        for (state, kind) in states.iter_mut().zip(*kinds) {
            for unit in fabric.plan.spec().unit_ids() {
                let id = |piece: &Piece| ParamId { unit, index: piece.param };
                let mut pieces = trained_pieces(fabric, unit).filter(|piece| places.has(id(piece)));
                state.fill(fabric, unit, |values| {
                    pieces.try_for_each(|piece| {
                        let into = &mut values[places.of_piece(unit, &piece)];
                        saved.read((kind, id(&piece)), piece.param_start, into)
                    })
                })?;
            }
        }
        Ok(())
    }

    /// The only kind of state of a run of elements, on the host.
    ///
    /// # Panics
    /// If the state lies on a device.
    pub(super) fn host(&mut self, unit: UnitId, piece: &Piece) -> &mut [f32] {
        let place = self.place(unit, piece);
        self.states[0].host(unit, place)
    }

    /// The place of a run of elements.
    pub(super) fn place(&self, unit: UnitId, piece: &Piece) -> Range<usize> {
        self.covered.places.of_piece(unit, piece)
    }
}

/// The tensors of these kinds of state of parameters.
pub(super) fn tensors_of(
    kinds: Kinds,
    parameters: impl Iterator<Item = ParamId>,
) -> Vec<StateTensor> {
    let of_parameter = |parameter| {
        kinds.iter().map(move |kind| StateTensor { kind, parameter, spread: Spread::Elements })
    };
    parameters.flat_map(of_parameter).collect()
}
