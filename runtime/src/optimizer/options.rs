//! The options of optimizers: their names, their values, and the values that they may have.

use std::fmt::{self, Debug, Display};

use hsdp_kernels::MomentumKind;
use serde_json::{Map, Value};

use crate::error::Error;
use crate::options::allowed::{Allowed, in_f32};
use crate::persist::options::RATE;

/// The options of a kind of optimizer.
pub trait OptimizerOptions: Copy + Debug + Send + Sync + 'static {
    /// The kind of optimizer, as errors and checkpoints name it.
    const KIND: &'static str;

    /// Calls `see` for each option. Errors, checkpoints and the comparison of ranks know them by
    /// these names. `see` may change a value, which the options must have afterwards.
    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>));
}

/// The value of an option.
pub enum Setting<'a> {
    /// The learning rate, which is finite in f32, and 0 or more. Checkpoints have it as
    /// `learning_rate` too, whatever its name.
    Rate(&'a mut f64),
    /// A number, and the numbers that are allowed.
    Number(&'a mut f64, Allowed),
    /// A number of times, each of which is allowed.
    Count(&'a mut usize),
    /// One of several ways, each of which is allowed. A checkpoint has the text of its `Debug`; the
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
    fn number(&self) -> Option<(f64, Allowed)> {
        match self {
            Self::Rate(value) => Some((**value, Allowed::NotNegative)),
            Self::Number(value, allowed) => Some((**value, *allowed)),
            Self::Count(_) | Self::Choice(..) => None,
        }
    }

    /// Returns the value for a checkpoint.
    fn json(&self) -> Value {
        match self {
            Self::Rate(value) | Self::Number(value, _) => Value::from(**value),
            Self::Count(count) => Value::from(**count),
            Self::Choice(value, _) => Value::from(format!("{value:?}")),
        }
    }

    /// Sets the value to that of a checkpoint, and returns whether it could.
    fn set(self, saved: &Value) -> bool {
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
pub(super) fn set(
    options: &mut impl OptimizerOptions,
    saved: &Value,
    of: &dyn Display,
) -> Result<(), String> {
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
pub(super) fn rate_of(options: &impl OptimizerOptions) -> f64 {
    let mut rate = 1.0;
    each(options, |_, setting| {
        if let Setting::Rate(value) = setting {
            rate = *value;
        }
    });
    rate
}

/// Sets the learning rate, if there is one among the options.
pub(super) fn set_rate(options: &mut impl OptimizerOptions, rate: f64) {
    options.options(&mut |_, setting| {
        if let Setting::Rate(value) = setting {
            *value = rate;
        }
    });
}

fn each(options: &impl OptimizerOptions, mut see: impl FnMut(&'static str, Setting<'_>)) {
    { *options }.options(&mut see);
}

/// Refuses options that are not allowed. `of` has them: an optimizer or a group.
///
/// # Errors
/// [`Error::Options`] that names the first of them.
pub(super) fn check(options: &impl OptimizerOptions, of: &dyn Display) -> Result<(), Error> {
    let mut checked = Ok(());
    each(options, |name, setting| {
        if let (Ok(()), Some((value, allowed))) = (&checked, setting.number()) {
            checked = check_number(of, name, value, allowed);
        }
    });
    checked.and_then(|()| check_products(options, of))
}

/// A bound of the factor by which an optimizer multiplies the rate for a matrix, the root of one of
/// its dims.
const LARGEST_ROOT: f64 = 16_777_216.0;

/// Refuses a learning rate that f32 holds, and whose products in an update it does not hold.
fn check_products(options: &impl OptimizerOptions, of: &dyn Display) -> Result<(), Error> {
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

/// Refuses a number that is not allowed.
///
/// # Errors
/// [`Error::Options`] that names it.
pub(super) fn check_number(
    of: &dyn Display,
    name: &str,
    value: f64,
    allowed: Allowed,
) -> Result<(), Error> {
    if allowed.allows(value) {
        return Ok(());
    }
    Err(Error::Options { what: format!("{of} {name} {value:?}: it must be {allowed}") })
}

/// Returns a line for each option, each of which begins with `of`.
pub(super) fn lines(options: &impl OptimizerOptions, of: &dyn Display) -> impl Display {
    fmt::from_fn(move |f| {
        let mut written = Ok(());
        each(options, |name, setting| {
            written = written.and_then(|()| writeln!(f, "{of} {name} {setting:?}"));
        });
        written
    })
}

/// Returns the options for a checkpoint.
pub(super) fn json(options: &impl OptimizerOptions) -> Value {
    let mut json = Map::new();
    each(options, |name, setting| {
        json.insert(name.to_owned(), setting.json());
    });
    // An optimizer of the program's own may list its rate under another name.
    json.entry(RATE).or_insert(Value::from(rate_of(options)));
    Value::Object(json)
}
