//! The rule by which an optimizer updates parameters, and its options: their values, checks, lines
//! for the comparison of ranks, and JSON for checkpoints.

use std::fmt::{self, Debug, Display};

use hsdp_kernels::MomentumKind;
use hsdp_kernels::cuda::{CudaError, DeviceBuffer, PieceOfStep};
use hsdp_sharding::{ModelSpec, Param, ParamId, Piece, UnitId, Wholes};
use serde_json::{Map, Value};

use crate::error::Error;
use crate::optimizer::interface::{DeviceRun, Run, Updating};
use crate::optimizer::state::{KindOfState, OptimizerState};
use crate::options::allowed::{Allowed, in_f32};
use crate::persist::checkpointed::{Spread, StateTensor};
use crate::persist::saved::RATE;

/// The options of a kind of optimizer, and the rule by which it updates an element from its
/// gradient and its own state.
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
///         for (parameter, gradient) in run.parameters.iter_mut().zip(run.gradient.iter()) {
///             *parameter -= rate * gradient.signum();
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

    /// Whether ranks exchange data in an update.
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
    #[cfg_attr(not(feature = "cuda"), doc(hidden))]
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

    /// Exchanges data with other ranks before an update, and changes no state.
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

/// The value of an option.
pub enum Setting<'a> {
    /// The learning rate, which is finite in f32, and 0 or more. Checkpoints have it as
    /// `learning_rate` too, whatever its name.
    Rate(&'a mut f64),
    /// A number, and the numbers that are allowed.
    Number(&'a mut f64, Allowed),
    /// A number of times; every number is allowed.
    Count(&'a mut usize),
    /// One of several ways; every way is allowed. A checkpoint has the text of its `Debug`; the
    /// function takes the way of such a text, and returns whether it could.
    Choice(&'a dyn Debug, &'a mut dyn FnMut(&str) -> bool),
}

impl Debug for Setting<'_> {
    /// Writes the value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(value) | Self::Number(value, _) => write!(f, "{value:?}"),
            Self::Count(count) => write!(f, "{count:?}"),
            Self::Choice(value, _) => write!(f, "{value:?}"),
        }
    }
}

impl Setting<'_> {
    /// Returns the value of a number, and the numbers that are allowed.
    pub(super) fn number(&self) -> Option<(f64, Allowed)> {
        match self {
            Self::Rate(value) => Some((**value, Allowed::NotNegative)),
            Self::Number(value, allowed) => Some((**value, *allowed)),
            Self::Count(_) | Self::Choice(..) => None,
        }
    }

    /// Returns the value for a checkpoint.
    pub(super) fn json(&self) -> Value {
        match self {
            Self::Rate(value) | Self::Number(value, _) => Value::from(**value),
            Self::Count(count) => Value::from(**count),
            Self::Choice(value, _) => Value::from(format!("{value:?}")),
        }
    }

    /// Sets the value to that of a checkpoint, and returns whether it could.
    pub(super) fn set(self, saved: &Value) -> bool {
        match self {
            Self::Rate(value) | Self::Number(value, _) => {
                saved.as_f64().map(|saved| *value = saved).is_some()
            }
            Self::Count(count) => {
                let saved = saved.as_u64().and_then(|saved| usize::try_from(saved).ok());
                saved.map(|saved| *count = saved).is_some()
            }
            Self::Choice(_, take) => saved.as_str().is_some_and(take),
        }
    }
}

/// Lists an option that is one of `all`.
pub(super) fn choice<T: Copy + Debug>(
    see: &mut dyn FnMut(&'static str, Setting<'_>),
    name: &'static str,
    value: &mut T,
    all: &[T],
) {
    let now = *value;
    let mut take = |saved: &str| {
        let taken = all.iter().find(|it| format!("{it:?}") == saved);
        taken.map(|taken| *value = *taken).is_some()
    };
    see(name, Setting::Choice(&now, &mut take));
}

/// All kinds of momentum.
pub(super) const MOMENTUM_KINDS: [MomentumKind; 2] =
    [MomentumKind::Classic, MomentumKind::Nesterov];

/// Sets all options to those of a checkpoint.
///
/// # Errors
/// The first option that the checkpoint lacks, or that cannot be set.
pub(super) fn set(options: &mut impl Rule, saved: &Value, of: &dyn Display) -> Result<(), String> {
    let mut all_set = Ok(());
    options.options(&mut |name, setting| {
        let own = setting.json();
        let saved = saved.get(name);
        if all_set.is_ok() && saved != Some(&own) && !saved.is_some_and(|it| setting.set(it)) {
            let saved = saved.map_or("missing".to_owned(), Value::to_string);
            all_set =
                Err(format!("{of} {name} is {saved} there, and cannot be taken in place of {own}"));
        }
    });
    all_set
}

/// Returns the learning rate; 1 if there is none among the options.
pub(super) fn rate_of(options: &impl Rule) -> f64 {
    let mut rate = 1.0;
    each(options, |_, setting| {
        if let Setting::Rate(value) = setting {
            rate = *value;
        }
    });
    rate
}

/// Sets the learning rate, if there is one among the options.
pub(super) fn set_rate(options: &mut impl Rule, rate: f64) {
    options.options(&mut |_, setting| {
        if let Setting::Rate(value) = setting {
            *value = rate;
        }
    });
}

fn each(options: &impl Rule, mut see: impl FnMut(&'static str, Setting<'_>)) {
    { *options }.options(&mut see);
}

/// Refuses options that are not allowed. `of` has them: an optimizer or a group.
///
/// # Errors
/// [`Error::Options`] that names the first of them.
pub(super) fn check(options: &impl Rule, of: &dyn Display) -> Result<(), Error> {
    let mut checked = Ok(());
    each(options, |name, setting| {
        if let (Ok(()), Some((value, allowed))) = (&checked, setting.number()) {
            checked = allowed.check(of, name, value);
        }
    });
    checked.and_then(|()| check_products(options, of))
}

/// A bound of the factor by which an optimizer multiplies the rate for a matrix, the root of one of
/// its dims.
const LARGEST_ROOT: f64 = 16_777_216.0;

/// Refuses a learning rate that f32 holds, and whose products in an update it does not hold.
fn check_products(options: &impl Rule, of: &dyn Display) -> Result<(), Error> {
    let rate = rate_of(options);
    let mut checked = Ok(());
    let mut check = |product: f64, what: &str| {
        if checked.is_ok() && !in_f32(product).is_finite() {
            let what = format!("{of} {RATE} {rate:?}: {what} it is not finite in f32");
            checked = Err(Error::Options { what });
        }
    };
    each(options, |name, setting| match (name, setting) {
        ("weight_decay", Setting::Number(decay, _)) => check(rate * *decay, "times weight_decay"),
        ("betas.0", Setting::Number(beta, _)) => check(rate / (1.0 - *beta), "over 1 - betas.0"),
        ("rate_scale", _) => check(rate * LARGEST_ROOT, "times the rate_scale of a large matrix"),
        _ => {}
    });
    checked
}

/// Returns a line for each option. Every line begins with `of`.
pub(super) fn lines(options: &impl Rule, of: &dyn Display) -> impl Display {
    fmt::from_fn(move |f| {
        let mut written = Ok(());
        each(options, |name, setting| {
            written = written.and_then(|()| writeln!(f, "{of} {name} {setting:?}"));
        });
        written
    })
}

/// Returns the options for a checkpoint.
pub(super) fn json(options: &impl Rule) -> Value {
    let mut json = Map::new();
    each(options, |name, setting| {
        json.insert(name.to_owned(), setting.json());
    });
    // An optimizer of the program's own may list its rate under another name.
    json.entry(RATE).or_insert(Value::from(rate_of(options)));
    Value::Object(json)
}
