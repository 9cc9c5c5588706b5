//! The state of an optimizer on this rank, with the results of an exchange that wait for their
//! update; the parameters that the optimizer updates, and the places of their state.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use hsdp_kernels::adafactor::ParameterSums;
use hsdp_kernels::cuda::DeviceBuffer;
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{EIGHT_BIT_BLOCK, EightBit};
use hsdp_sharding::{ALIGNMENT, ModelSpec, ParamId, Piece, Role, UnitId};

use crate::error::Error;
use crate::optimizer::exchange::{MatrixExchange, Staged};
use crate::optimizer::interface::Updating;
use crate::optimizer::owner_workspace::OwnerWorkspace;
use crate::persist::checkpointed::{Spread, StateTensor};
use crate::persist::saved::SavedState;
use crate::state::context::{Context, ErrorSite};
use crate::state::store::LocatedF32;

/// The state of an optimizer.
#[derive(Debug)]
pub(super) struct OptimizerState {
    pub(super) covered: Covered,
    /// In the order of the rule's kinds.
    pub(super) kinds: Vec<KindOfState>,
    /// The exchange with the owners of matrices, if the rule has one.
    pub(super) exchange: Option<MatrixExchange>,
    pub(super) staged: StagedUpdate,
    /// Buffers of a device for the exchange, from the first one on.
    pub(super) on_device: Option<OwnerWorkspace>,
}

/// The results of an exchange, until the update has applied them.
#[derive(Debug, Default)]
pub(super) struct StagedUpdate {
    /// New elements of matrices.
    pub(super) matrices: Staged,
    /// State that an update puts in place when it begins, by kind and parameter.
    pub(super) next: BTreeMap<(usize, ParamId), Vec<f32>>,
    pub(super) sums: BTreeMap<ParamId, ParameterSums>,
}

impl OptimizerState {
    /// Begins an update that is certain, and counts it.
    pub(super) fn begin(&mut self, updating: &Updating<'_>) {
        self.covered.begin(updating);
        for ((kind, parameter), next) in std::mem::take(&mut self.staged.next) {
            self.kinds[kind].whole_mut(parameter).copy_from_slice(&next);
        }
        if self.exchange.is_some() {
            self.staged.matrices.begin(updating);
        }
    }

    /// Returns elements of a tensor of a parameter's state that this rank has: borrowed, or a copy.
    /// `None` if it has no such tensor.
    pub(super) fn elements(
        &self,
        site: ErrorSite<'_>,
        kind: &str,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Result<Option<Cow<'_, [f32]>>, Error> {
        let Some((kind, place)) = self.place(kind, parameter, range) else { return Ok(None) };
        let unit = parameter.unit.index();
        match kind.codes.get(unit) {
            None => kind.stores[unit].to_host(site, place).map(Some),
            Some(codes) => Ok(Some(codes[place].iter().copied().map(f32::from).collect())),
        }
    }

    /// Copies elements of a tensor, from the `start`-th on, until `into` is full. `false` if there
    /// is no such tensor.
    pub(super) fn copy_elements(
        &self,
        site: ErrorSite<'_>,
        kind: &str,
        parameter: ParamId,
        start: usize,
        into: &mut [f32],
    ) -> Result<bool, Error> {
        let range = start..start + into.len();
        let Some((kind, place)) = self.place(kind, parameter, range) else { return Ok(false) };
        let unit = parameter.unit.index();
        match kind.codes.get(unit) {
            None => kind.stores[unit].copy_to(site, place.start, into)?,
            Some(codes) => {
                let codes = codes[place].iter().copied();
                into.iter_mut().zip(codes).for_each(|(into, code)| *into = f32::from(code));
            }
        }
        Ok(true)
    }

    fn place(
        &self,
        kind: &str,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Option<(&KindOfState, Range<usize>)> {
        let kind = self.kinds.iter().find(|it| it.name == kind)?;
        Some((kind, kind.places.of_elements(parameter, range)?))
    }

    /// Fills this rank's part of the state: `read` gets the kind, the parameter and the first
    /// element of its tensor, and may leave zeros as they are.
    pub(super) fn fill<E: From<Error>>(
        &mut self,
        site: ErrorSite<'_>,
        mut read: impl FnMut(&'static str, ParamId, usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let spec = site.context.plan.spec();
        for KindOfState { name, places, stores, codes } in &mut self.kinds {
            for (unit, store) in spec.unit_ids().zip(stores) {
                store.fill(site, |values| {
                    let mut parts = places.of_unit(unit);
                    parts.try_for_each(|(id, start, place)| {
                        read(name, id, start, &mut values[place])
                    })
                })?;
            }
            for (unit, codes) in spec.unit_ids().zip(codes) {
                for (id, start, place) in places.of_unit(unit) {
                    let mut numbers = hsdp_kernels::zeros(place.len()).map_err(Error::from)?;
                    read(name, id, start, &mut numbers)?;
                    let codes = codes[place].iter_mut().zip(&numbers);
                    codes.for_each(|(code, number)| *code = code_of(*number));
                }
            }
        }
        Ok(())
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "codes are whole numbers from 0 to 255, and a cast saturates"
)]
fn code_of(number: f32) -> u8 {
    number as u8
}

/// One kind of state, such as `exp_avg`.
#[derive(Debug)]
pub(super) struct KindOfState {
    name: &'static str,
    places: StatePlaces,
    /// By unit. Empty for codes.
    stores: Vec<LocatedF32>,
    /// Codes of 8 bits, by unit. Empty for other state.
    codes: Vec<Vec<u8>>,
}

impl KindOfState {
    /// Makes zeros, where the model is updated.
    ///
    /// # Errors
    /// As [`LocatedF32::zeros`].
    pub(super) fn zeros(
        site: ErrorSite<'_>,
        name: &'static str,
        places: StatePlaces,
    ) -> Result<Self, Error> {
        let stores = LocatedF32::zeros(site, places.lens())?;
        Ok(Self { name, places, stores, codes: Vec::new() })
    }

    /// Makes codes of zero, on the host.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn zero_codes(
        site: ErrorSite<'_>,
        name: &'static str,
        places: StatePlaces,
    ) -> Result<Self, Error> {
        let zeros = |(unit, len)| {
            let zeros = {
                let _optimizer = memory::scope(Category::Optimizer);
                bytemuck::allocation::try_zeroed_vec(len)
            };
            let failed = |()| hsdp_kernels::Error::OutOfMemory { bytes: len };
            zeros.map_err(failed).map_err(|error| site.memory(UnitId::new(unit), error))
        };
        let codes = places.lens().enumerate().map(zeros).collect::<Result<_, _>>()?;
        Ok(Self { name, places, stores: Vec::new(), codes })
    }

    /// Returns the elements of a run, on the host.
    pub(super) fn of_run(&self, unit: UnitId, piece: &Piece) -> &[f32] {
        &self.stores[unit.index()].here()[self.places.of_piece(unit, piece)]
    }

    /// Returns the elements of a run, on the host, to change them.
    pub(super) fn of_run_mut(&mut self, unit: UnitId, piece: &Piece) -> &mut [f32] {
        &mut self.stores[unit.index()].here_mut()[self.places.of_piece(unit, piece)]
    }

    /// Returns the buffer of a unit on a device.
    pub(super) fn on_device(&mut self, unit: UnitId) -> &mut DeviceBuffer {
        self.stores[unit.index()].there_mut()
    }

    /// Returns the first element of a piece in the buffer of its unit.
    pub(super) fn start(&self, unit: UnitId, piece: &Piece) -> usize {
        self.places.of_piece(unit, piece).start
    }

    /// Returns all elements of a parameter that each rank has.
    ///
    /// # Panics
    /// If there are none.
    pub(super) fn whole(&self, parameter: ParamId) -> &[f32] {
        let place = self.places.of_parameter(parameter).expect("the parameter has such state");
        &self.stores[parameter.unit.index()].here()[place]
    }

    fn whole_mut(&mut self, parameter: ParamId) -> &mut [f32] {
        let place = self.places.of_parameter(parameter).expect("it was computed from this state");
        &mut self.stores[parameter.unit.index()].here_mut()[place]
    }
}

/// The kinds of two moments in 8 bits an element: codes and scales of the first, and of the second.
pub(super) const EIGHT_BIT_KINDS: &[&str] =
    &["exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale"];

/// Returns the tensors of two moments in 8 bits.
pub(super) fn eight_bit_tensors(parameter: ParamId) -> Vec<StateTensor> {
    let spreads = [Spread::Elements, Spread::Blocks(EIGHT_BIT_BLOCK)].into_iter().cycle();
    let kinds = EIGHT_BIT_KINDS.iter().zip(spreads);
    kinds.map(|(kind, spread)| StateTensor { kind, parameter, spread }).collect()
}

/// Returns two moments of a run; `None` if they are not kept in 8 bits.
pub(super) fn eight_bit<'a>(
    kinds: &'a mut [KindOfState],
    unit: UnitId,
    piece: &Piece,
) -> Option<[EightBit<'a>; 2]> {
    let [first, first_scales, second, second_scales] = kinds else { return None };
    let moment = |codes: &'a mut KindOfState, scales: &'a mut KindOfState| EightBit {
        codes: &mut codes.codes[unit.index()][codes.places.of_piece(unit, piece)],
        scales: scales.of_run_mut(unit, piece),
    };
    Some([moment(first, first_scales), moment(second, second_scales)])
}

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
                        updating.assignment.text_of(updating.context, id)
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
    /// The place of each parameter of each unit, if this rank has elements of it.
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
            for piece in context.updated_pieces(unit) {
                own[piece.param] = Some(piece.param_range());
            }
            let mut len = 0;
            let place = |(index, own): (usize, Option<Range<usize>>)| {
                let spread = spread(ParamId { unit, index })?;
                let elements = match spread {
                    Spread::Elements | Spread::Blocks(_) => spread.range(own?),
                    Spread::Whole(len) => 0..len,
                    Spread::Owned { len, owner } if owner == context.updaters().index() => 0..len,
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
