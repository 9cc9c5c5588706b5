//! The state of an optimizer on this rank, and the results of an exchange that wait for their update.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use hsdp_kernels::adafactor::ParameterSums;
use hsdp_kernels::cuda::DeviceBuffer;
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{EIGHT_BIT_BLOCK, EightBit};
use hsdp_sharding::{ParamId, Piece, UnitId};

use crate::error::Error;
use crate::optimizer::covered::{Covered, StatePlaces};
use crate::optimizer::exchange::{Exchange, Staged};
use crate::optimizer::owner_workspace::OwnerWorkspace;
use crate::optimizer::updating::Updating;
use crate::persist::checkpointed::{Spread, StateTensor};
use crate::state::context::{Context, ErrorSite};
use crate::state::store::Store;

/// The state of an optimizer.
#[derive(Debug)]
pub(super) struct OptimizerState {
    pub(super) covered: Covered,
    /// In the order of the rule's kinds.
    pub(super) kinds: Vec<KindOfState>,
    /// The exchange with the owners of matrices, if the rule has one.
    pub(super) exchange: Option<Exchange>,
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
        context: &Context,
        kind: &str,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Result<Option<Cow<'_, [f32]>>, Error> {
        let Some((kind, place)) = self.place(kind, parameter, range) else { return Ok(None) };
        let unit = parameter.unit.index();
        match kind.codes.get(unit) {
            None => kind.stores[unit].to_host(&context.site("saving", 0), place).map(Some),
            Some(codes) => Ok(Some(codes[place].iter().copied().map(f32::from).collect())),
        }
    }

    /// Copies elements of a tensor, from the `start`-th on, until `into` is full. `false` if there
    /// is no such tensor.
    pub(super) fn copy_elements(
        &self,
        context: &Context,
        kind: &str,
        parameter: ParamId,
        start: usize,
        into: &mut [f32],
    ) -> Result<bool, Error> {
        let range = start..start + into.len();
        let Some((kind, place)) = self.place(kind, parameter, range) else { return Ok(false) };
        let unit = parameter.unit.index();
        match kind.codes.get(unit) {
            None => kind.stores[unit].copy_to(&context.site("saving", 0), place.start, into)?,
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
        context: &Context,
        mut read: impl FnMut(&'static str, ParamId, usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let site = context.site("loading", 0);
        for KindOfState { name, places, stores, codes } in &mut self.kinds {
            for (unit, store) in context.plan.spec().unit_ids().zip(stores) {
                store.fill(&site, |values| {
                    let mut parts = places.of_unit(unit);
                    parts.try_for_each(|(id, start, place)| {
                        read(name, id, start, &mut values[place])
                    })
                })?;
            }
            for (unit, codes) in context.plan.spec().unit_ids().zip(codes) {
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
    stores: Vec<Store>,
    /// Codes of 8 bits, by unit. Empty for other state.
    codes: Vec<Vec<u8>>,
}

impl KindOfState {
    /// Makes zeros, where the model is updated.
    ///
    /// # Errors
    /// As [`Store::zeros`].
    pub(super) fn zeros(
        site: &ErrorSite<'_>,
        name: &'static str,
        places: StatePlaces,
    ) -> Result<Self, Error> {
        let stores = Store::zeros(site, places.lens())?;
        Ok(Self { name, places, stores, codes: Vec::new() })
    }

    /// Makes codes of zero, on the host.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn zero_codes(
        site: &ErrorSite<'_>,
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
