//! The rule by which an optimizer updates parameters.

use std::fmt::{self, Debug};

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, PieceOfStep};
use hsdp_sharding::{ModelSpec, Param, ParamId, Piece, UnitId, Wholes};

use crate::error::Error;
use crate::optimizer::run::{DeviceRun, Run};
use crate::optimizer::setting::Setting;
use crate::optimizer::state::{KindOfState, OptimizerState};
use crate::optimizer::updating::Updating;
use crate::persist::checkpointed::{Spread, StateTensor};

/// The options of a kind of optimizer, and the rule by which it updates an element from its gradient
/// and its own state.
///
/// ```
/// use hsdp::{Rule, Run, RunState, Setting};
///
/// /// Moves each element by the sign of its gradient.
/// #[derive(Clone, Copy, Debug)]
/// struct Signs {
///     rate: f64,
/// }
///
/// impl Rule for Signs {
///     const KIND: &'static str = "signs";
///
///     fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
///         see("learning_rate", Setting::Rate(&mut self.rate));
///     }
///
///     fn update(&self, _: u64, run: Run<'_>, _: RunState<'_>) {
///         let rate = self.rate as f32;
///         for (parameter, gradient) in run.parameters.iter_mut().zip(run.gradient) {
///             *parameter -= rate * (gradient * run.clip).signum();
///         }
///     }
/// }
/// ```
pub trait Rule: Copy + Debug + Send + Sync + 'static {
    /// The kind of optimizer, as errors and checkpoints name it.
    const KIND: &'static str;

    /// Whether an update depends on the number of updates before it.
    const COUNTS: bool = false;

    /// Whether [`update_on_device`](Self::update_on_device) is implemented. If not, a model that is
    /// updated on a device is refused.
    const ON_DEVICE: bool = false;

    /// Whether ranks of the shard group exchange data in an update.
    #[doc(hidden)]
    const COLLECTIVE: bool = false;

    /// The matrices that owners compute, if there are any.
    #[doc(hidden)]
    const WHOLES: Option<Wholes> = None;

    /// Calls `see` for each option. Errors, checkpoints and the comparison of ranks know them by
    /// these names. `see` may change a value, which the options must have afterwards.
    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>));

    /// Returns the kinds of state that an optimizer with these options keeps, each an f32 for each
    /// element.
    fn kinds(&self) -> &'static [&'static str] {
        &[]
    }

    /// Updates elements on the host, for the `number`-th time.
    fn update(&self, number: u64, run: Run<'_>, state: RunState<'_>);

    /// Updates pieces of a unit on a device.
    ///
    /// # Errors
    /// Errors of the device.
    fn update_on_device(&self, run: DeviceRun<'_>, state: RunState<'_>) -> Result<(), CudaError> {
        let _ = (run, state);
        unreachable!("an update by {} on a device is refused", Self::KIND)
    }

    /// Returns the tensors of a parameter's state.
    #[doc(hidden)]
    fn tensors(&self, parameter: ParamId, param: &Param) -> Vec<StateTensor> {
        let _ = param;
        let spread = Spread::Elements;
        self.kinds().iter().map(|kind| StateTensor { kind, parameter, spread }).collect()
    }

    /// Exchanges data with the ranks of the shard group before an update, and changes no state.
    #[doc(hidden)]
    fn exchange(now: RuleExchange<'_, Self>) -> Result<(), Error> {
        let _ = now;
        Ok(())
    }
}

/// An exchange of a rule before an update.
#[doc(hidden)]
pub struct RuleExchange<'a, O> {
    pub(super) options: &'a dyn Fn(ParamId) -> O,
    pub(super) state: &'a mut OptimizerState,
    pub(super) updating: &'a Updating<'a>,
}

impl<O> Debug for RuleExchange<'_, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuleExchange").field("state", &self.state).finish_non_exhaustive()
    }
}

/// The state of the elements that are updated at once: of a run on the host, or of a unit on a
/// device.
#[derive(Debug)]
pub struct RunState<'a> {
    pub(super) state: &'a mut OptimizerState,
    pub(super) spec: &'a ModelSpec,
    pub(super) unit: UnitId,
    /// The run on the host.
    pub(super) piece: Option<Piece>,
}

/// The contract between an optimizer and its rule, in panics that only a wrong rule sees.
const ON_HOST: &str = "a rule reads state on the host in an update on the host";
const KINDS: &str = "a rule knows its kinds of state";

impl<'a> RunState<'a> {
    /// Returns the elements of all kinds, on the host.
    ///
    /// # Panics
    /// If the optimizer has another number of kinds, or updates on a device.
    #[must_use]
    pub fn kinds<const K: usize>(self) -> [&'a mut [f32]; K] {
        let Self { state, unit, piece, .. } = self;
        let piece = piece.expect(ON_HOST);
        let kinds: &mut [KindOfState; K] = (&mut *state.kinds).try_into().expect(KINDS);
        kinds.each_mut().map(|kind| kind.of_run_mut(unit, &piece))
    }

    /// Returns the elements of the only kind, on the host, if the optimizer has state.
    ///
    /// # Panics
    /// If the optimizer updates on a device.
    #[must_use]
    pub fn only(self) -> Option<&'a mut [f32]> {
        let piece = self.piece.expect(ON_HOST);
        self.state.kinds.first_mut().map(|kind| kind.of_run_mut(self.unit, &piece))
    }

    /// Returns the unit's buffers of all kinds, on a device.
    ///
    /// # Panics
    /// If the optimizer has another number of kinds, or updates on the host.
    #[must_use]
    pub fn on_device<const K: usize>(self) -> [&'a mut DeviceBuffer; K] {
        let Self { state, unit, .. } = self;
        let kinds: &mut [KindOfState; K] = (&mut *state.kinds).try_into().expect(KINDS);
        kinds.each_mut().map(|kind| kind.on_device(unit))
    }

    /// Returns the unit's buffer of the only kind, on a device, if the optimizer has state.
    ///
    /// # Panics
    /// If the optimizer updates on the host.
    #[must_use]
    pub fn only_on_device(self) -> Option<&'a mut DeviceBuffer> {
        self.state.kinds.first_mut().map(|kind| kind.on_device(self.unit))
    }

    /// Returns pieces of the unit for a kernel, each with the number of its update.
    #[must_use]
    pub fn pieces(&self, pieces: &[Piece]) -> Vec<PieceOfStep> {
        let of_step = |piece: &Piece| {
            let step = self.state.covered.count(ParamId { unit: self.unit, index: piece.param });
            let first = self.state.kinds.first();
            let state = first.map_or(0, |kind| kind.start(self.unit, piece));
            PieceOfStep { range: piece.shard_range(), state, step }
        };
        pieces.iter().map(of_step).collect()
    }
}
