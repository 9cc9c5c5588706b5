//! The parameters that an optimizer updates, the number of updates of each, and the places of their
//! state.

use std::collections::BTreeSet;
use std::ops::Range;

use hsdp_sharding::{ALIGNMENT, ModelSpec, ParamId, Piece, Role, UnitId};

use crate::error::Error;
use crate::optimizer::pieces::trained_pieces;
use crate::optimizer::updating::Updating;
use crate::persist::checkpointed::Spread;
use crate::persist::saved::SavedState;
use crate::state::context::Context;

/// The parameters that an optimizer updates.
#[derive(Clone, Debug)]
pub(super) struct Covered {
    /// Number of updates of each of these parameters, by unit and parameter. A step in which a
    /// parameter has no gradient does not count.
    updates: Vec<Vec<Option<u64>>>,
    cover: Cover,
}

/// The parameters that the next update may be of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Cover {
    /// The present ones and no others.
    Fixed,
    /// Any, if they include these, whose state a checkpoint had. It lacked the state of others, so
    /// the next update decides which optimizer gets them.
    Open { loaded: BTreeSet<ParamId> },
}

impl Covered {
    /// Returns the trainable parameters that `has` selects, without any update.
    pub(super) fn of(context: &Context, has: impl Fn(ParamId) -> bool) -> Self {
        let spec = context.plan.spec();
        let mut updates: Vec<Vec<Option<u64>>> =
            spec.units().iter().map(|unit| vec![None; unit.params.len()]).collect();
        for (id, param) in spec.params() {
            if param.role == Role::Trainable && has(id) {
                updates[id.unit.index()][id.index] = Some(0);
            }
        }
        Self { updates, cover: Cover::Fixed }
    }

    /// Returns whether the optimizer updates a parameter.
    pub(super) fn has(&self, parameter: ParamId) -> bool {
        self.updates[parameter.unit.index()][parameter.index].is_some()
    }

    /// Checks that an optimizer of this kind, whose state is of these parameters, may update those
    /// of an update. Returns whether they are the same; if not, the state has to be made anew.
    ///
    /// # Errors
    /// [`Error::Options`] that names a parameter whose state would be lost, or which it may not
    /// update.
    pub(super) fn check(&self, kind: &str, updating: &Updating<'_>) -> Result<bool, Error> {
        let params = || updating.plan().spec().params();
        let differs = |id: ParamId| self.has(id) != updating.has(id);
        let is_refused = |id: ParamId| match &self.cover {
            Cover::Fixed => differs(id),
            Cover::Open { loaded } => loaded.contains(&id) && !updating.has(id),
        };
        match params().find(|(id, _)| is_refused(*id)) {
            None => Ok(!params().any(|(id, _)| differs(id))),
            Some((id, param)) => {
                let name = &param.name;
                let what = match self.has(id) {
                    true => format!(
                        "parameter `{name}`: {kind} has state of it, and {} updates it now; select \
                         it for {kind}",
                        updating.optimizer_of(id)
                    ),
                    false => format!(
                        "parameter `{name}`: {kind} has no state of it, because it did not update \
                         it in its first update"
                    ),
                };
                Err(Error::Options { what })
            }
        }
    }

    /// Returns the parameters, in the order of the model.
    pub(super) fn parameters(&self) -> impl Iterator<Item = ParamId> {
        self.updates.iter().enumerate().flat_map(|(unit, updates)| {
            let counted = updates.iter().enumerate().filter(|(_, count)| count.is_some());
            counted.map(move |(index, _)| ParamId { unit: UnitId::new(unit), index })
        })
    }

    /// Counts an update, after which the parameters stay the same.
    pub(super) fn begin(&mut self, updating: &Updating<'_>) {
        self.cover = Cover::Fixed;
        self.count_as(|id, count| count + u64::from(updating.updates(id)));
    }

    /// Returns whether the next update may be of further parameters.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.cover, Cover::Open { .. })
    }

    /// Returns whether a checkpoint had the state of a parameter, and no update has followed.
    pub(super) fn has_loaded(&self, parameter: ParamId) -> bool {
        matches!(&self.cover, Cover::Open { loaded } if loaded.contains(&parameter))
    }

    /// Returns the number of updates of a parameter; 0 if the optimizer does not update it.
    pub(super) fn count(&self, parameter: ParamId) -> u64 {
        self.updates[parameter.unit.index()][parameter.index].unwrap_or(0)
    }

    /// Returns the number of updates of each parameter, by name.
    pub(super) fn counts(&self, spec: &ModelSpec) -> impl Iterator<Item = (String, u64)> {
        self.parameters().map(|id| (spec[id].name.clone(), self.count(id)))
    }

    /// Takes the numbers of updates of the parameters that both have.
    pub(super) fn take_over(&mut self, earlier: &Self) {
        self.count_as(|id, _| earlier.count(id));
        self.cover = earlier.cover.clone();
    }

    /// Takes the numbers of updates in a checkpoint.
    pub(super) fn read(&mut self, saved: &SavedState<'_>) {
        self.count_as(|id, _| saved.updates(id));
        if saved.is_open() {
            let loaded = self.parameters().filter(|id| saved.takes_state(*id)).collect();
            self.cover = Cover::Open { loaded };
        }
    }

    fn count_as(&mut self, number: impl Fn(ParamId, u64) -> u64) {
        for (unit, updates) in self.updates.iter_mut().enumerate() {
            let unit = UnitId::new(unit);
            for (index, count) in updates.iter_mut().enumerate() {
                *count = count.map(|count| number(ParamId { unit, index }, count));
            }
        }
    }
}

/// The places of one kind of state in the buffers of units: this rank's elements of the tensors of
/// all parameters, one after the other.
#[derive(Clone, Debug)]
pub(super) struct StatePlaces {
    /// By unit and parameter, if this rank has elements.
    places: Vec<Vec<Option<StatePlace>>>,
    /// Length of each unit's buffer.
    lens: Vec<usize>,
}

/// The place of this rank's elements of a tensor.
#[derive(Clone, Debug)]
struct StatePlace {
    spread: Spread,
    /// The elements, in the tensor.
    elements: Range<usize>,
    /// Index of the first one in the buffer.
    start: usize,
}

impl StatePlaces {
    /// Places the tensors whose spread is given for their parameters.
    pub(super) fn of(context: &Context, spread: impl Fn(ParamId) -> Option<Spread>) -> Self {
        let mut places = Vec::new();
        let mut lens = Vec::new();
        for unit in context.plan.spec().unit_ids() {
            let mut own = vec![None; context.plan.spec()[unit].params.len()];
            for piece in trained_pieces(context, unit) {
                own[piece.param] = Some(piece.param_range());
            }
            let mut len = 0;
            let place = |(index, own): (usize, Option<Range<usize>>)| {
                let spread = spread(ParamId { unit, index })?;
                let elements = match spread {
                    Spread::Elements | Spread::Blocks(_) => spread.range(own?),
                    Spread::Whole(len) => 0..len,
                    Spread::Owned { len, owner } if owner == context.shard_index() => 0..len,
                    Spread::Owned { .. } => return None,
                };
                // Vector loads of elements are aligned.
                let quantum = if spread == Spread::Elements { ALIGNMENT } else { 1 };
                let start = len;
                len += elements.len().next_multiple_of(quantum);
                Some(StatePlace { spread, elements, start })
            };
            places.push(own.into_iter().enumerate().map(place).collect());
            lens.push(len);
        }
        Self { places, lens }
    }

    /// Returns the length of each unit's buffer.
    pub(super) fn lens(&self) -> impl Iterator<Item = usize> {
        self.lens.iter().copied()
    }

    /// Returns the place of the elements that belong to a piece of this rank's shard, or to a part
    /// of one.
    ///
    /// # Panics
    /// If there is no state of the piece.
    pub(super) fn of_piece(&self, unit: UnitId, piece: &Piece) -> Range<usize> {
        let place = self.places[unit.index()][piece.param].as_ref();
        let place = place.expect("the optimizer has state of the pieces that it updates");
        place.range(place.spread.range(piece.param_range()))
    }

    /// Returns the place of elements of a parameter's tensor; `None` if this rank has none.
    pub(super) fn of_elements(
        &self,
        parameter: ParamId,
        elements: Range<usize>,
    ) -> Option<Range<usize>> {
        let place = self.places[parameter.unit.index()][parameter.index].as_ref()?;
        Some(place.range(elements))
    }

    /// Returns the place of all elements of a parameter's tensor that this rank has, if any.
    pub(super) fn of_parameter(&self, parameter: ParamId) -> Option<Range<usize>> {
        let place = self.places[parameter.unit.index()][parameter.index].as_ref()?;
        Some(place.range(place.elements.clone()))
    }

    /// Returns each parameter of a unit that has state on this rank, with the first element in the
    /// tensor, and with the place of all elements.
    pub(super) fn of_unit(
        &self,
        unit: UnitId,
    ) -> impl Iterator<Item = (ParamId, usize, Range<usize>)> {
        self.places[unit.index()].iter().enumerate().filter_map(move |(index, place)| {
            let place = place.as_ref()?;
            let elements = place.elements.clone();
            Some((ParamId { unit, index }, elements.start, place.range(elements)))
        })
    }
}

impl StatePlace {
    fn range(&self, elements: Range<usize>) -> Range<usize> {
        let start = self.start + elements.start - self.elements.start;
        start..start + elements.len()
    }
}
