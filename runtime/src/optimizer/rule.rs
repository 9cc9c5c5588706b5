//! The rule of an optimizer that updates each element from its gradient and its own state.

use std::ops::Range;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DeviceUpdate, PieceOfStep, Stream};
use hsdp_sharding::UnitId;

use crate::optimizer::options::OptimizerOptions;
use crate::optimizer::run::Run;
use crate::state::store::Store;

/// The rule by which an optimizer with these options updates an element.
pub trait Rule: OptimizerOptions {
    /// Whether an update depends on the number of updates before it.
    const COUNTS: bool;

    /// Whether [`update_on_device`](Self::update_on_device) is implemented. If not, a model that is updated on a device is refused.
    const ON_DEVICE: bool;

    /// The kinds of state that an optimizer with these options keeps, each an f32 for each element.
    fn kinds(&self) -> &'static [&'static str];

    /// Updates elements on the host, for the `number`-th time.
    fn update(&self, number: u64, run: Run<'_>, state: RunState<'_>);

    /// Updates pieces of a unit on a device.
    ///
    /// # Errors
    /// Errors of the device.
    fn update_on_device(
        &self,
        run: UnitRun<'_>,
        pieces: &[PieceOfStep],
        state: UnitState<'_>,
    ) -> Result<(), CudaError> {
        let _ = (run, pieces, state);
        unreachable!("an update by {} on a device is refused", Self::KIND)
    }
}

/// The state of a run, on the host.
#[derive(Debug)]
pub struct RunState<'a> {
    pub(super) states: &'a mut [Vec<Store>],
    pub(super) unit: UnitId,
    pub(super) range: Range<usize>,
}

impl<'a> RunState<'a> {
    /// The elements of all kinds.
    ///
    /// # Panics
    /// If the optimizer has another number of kinds.
    #[must_use]
    pub fn kinds<const K: usize>(self) -> [&'a mut [f32]; K] {
        let Self { states, unit, range } = self;
        let states: &mut [Vec<Store>; K] =
            states.try_into().expect("a rule knows its kinds of state");
        states.each_mut().map(|state| &mut state[unit.index()].here_mut()[range.clone()])
    }

    /// The elements of the only kind, if the optimizer has state.
    #[must_use]
    pub fn only(self) -> Option<&'a mut [f32]> {
        let Self { states, unit, range } = self;
        states.first_mut().map(|state| &mut state[unit.index()].here_mut()[range])
    }
}

/// A unit on a device, without its state.
#[derive(Debug)]
pub struct UnitRun<'a> {
    /// The stream on which the update is to run.
    pub stream: &'a Stream,
    /// The f32 master parameters, the gradient, and its divisor.
    pub update: DeviceUpdate<'a>,
    /// The factor by which the gradient is multiplied first.
    pub clip: f32,
}

/// The state of a unit, on a device.
#[derive(Debug)]
pub struct UnitState<'a> {
    pub(super) states: &'a mut [Vec<Store>],
    pub(super) unit: UnitId,
}

impl<'a> UnitState<'a> {
    /// The buffers of all kinds.
    ///
    /// # Panics
    /// If the optimizer has another number of kinds.
    #[must_use]
    pub fn kinds<const K: usize>(self) -> [&'a mut DeviceBuffer; K] {
        let Self { states, unit } = self;
        let states: &mut [Vec<Store>; K] =
            states.try_into().expect("a rule knows its kinds of state");
        states.each_mut().map(|state| state[unit.index()].there_mut())
    }

    /// The buffer of the only kind, if the optimizer has state.
    #[must_use]
    pub fn only(self) -> Option<&'a mut DeviceBuffer> {
        let Self { states, unit } = self;
        states.first_mut().map(|state| state[unit.index()].there_mut())
    }
}
