//! The options of optimizers: their names, their values, and the values that they may have.

use std::fmt::{self, Debug, Display};

use hsdp_kernels::MomentumKind;
use serde_json::{Map, Value};

use crate::error::Error;
use crate::options::allowed::{Allowed, in_f32};
use crate::persist::saved::RATE;

/// The options of a kind of optimizer.
pub trait OptimizerOptions: Copy + Debug + Send + Sync + 'static {
    /// The kind of optimizer, as errors and checkpoints name it.
    const KIND: &'static str;

    /// The learning rate.
    fn learning_rate(&mut self) -> &mut f64;

    /// Calls `see` for each option, with its name and its value. Errors, checkpoints and the comparison of ranks name them so.
    fn each(&self, see: &mut dyn FnMut(&'static str, Setting<'_>));

    /// Sets an option to the value that a checkpoint has under its name, and returns whether it
    /// could. A choice is saved as the text of its `Debug`. Only
    /// [`OtherOptions::TakeSaved`](crate::checkpoint::OtherOptions::TakeSaved) needs it, where an
    /// option differs.
    fn set(&mut self, name: &str, saved: &Value) -> bool {
        let _ = (name, saved);
        false
    }
}

/// Sets all options to those of a checkpoint.
///
/// # Errors
/// The first option that the checkpoint lacks, or that cannot be set.
pub(super) fn set(
    options: &mut impl OptimizerOptions,
    saved: &Value,
    of: &dyn Display,
) -> Result<(), String> {
    let (before, mut names) = (json(options), Vec::new());
    options.each(&mut |name, _| names.push(name));
    for name in names {
        let (own, saved) = (&before[name], saved.get(name));
        if saved == Some(own) {
            continue;
        }
        if !saved.is_some_and(|saved| options.set(name, saved)) {
            let saved = saved.map_or("missing".to_owned(), Value::to_string);
            return Err(format!(
                "{of} {name} is {saved} there, and cannot be taken in place of {own}"
            ));
        }
    }
    Ok(())
}

/// All kinds of momentum.
pub(super) const MOMENTUM_KINDS: [MomentumKind; 2] =
    [MomentumKind::Classic, MomentumKind::Nesterov];

/// Sets a number to a saved one, if that is a number.
pub(super) fn set_number(number: &mut f64, saved: &Value) -> bool {
    saved.as_f64().map(|saved| *number = saved).is_some()
}

/// Sets a choice to that of `all` whose text was saved.
pub(super) fn set_choice<T: Copy + Debug>(choice: &mut T, all: &[T], saved: &Value) -> bool {
    let is_saved = |it: &&T| saved.as_str().is_some_and(|saved| format!("{it:?}") == saved);
    all.iter().find(is_saved).map(|saved| *choice = *saved).is_some()
}

/// The value of an option.
#[derive(Clone, Copy, Debug)]
pub enum Setting<'a> {
    /// A number, and the numbers that are allowed.
    Number(f64, Allowed),
    /// A number of times, each of which is allowed.
    Count(usize),
    /// One of several ways, each of which is allowed.
    Choice(&'a dyn Debug),
}

/// Refuses options that are not allowed. `of` has them: an optimizer or a group.
///
/// # Errors
/// [`Error::Options`] that names the first of them.
pub(super) fn check(options: &impl OptimizerOptions, of: &dyn Display) -> Result<(), Error> {
    let mut checked = Ok(());
    options.each(&mut |name, setting| {
        if let (Ok(()), Setting::Number(value, allowed)) = (&checked, setting) {
            checked = check_number(of, name, (value, allowed));
        }
    });
    checked.and_then(|()| check_products(options, of))
}

/// A bound of the factor by which an optimizer multiplies the rate for a matrix, the root of one of
/// its dims.
const LARGEST_ROOT: f64 = 16_777_216.0;

/// Refuses a learning rate that f32 holds, and whose products in an update it does not hold.
fn check_products(options: &impl OptimizerOptions, of: &dyn Display) -> Result<(), Error> {
    let rate = *{ *options }.learning_rate();
    let mut checked = Ok(());
    let mut check = |product: f64, what: &str| {
        if checked.is_ok() && !in_f32(product).is_finite() {
            let what = format!("{of} {RATE} {rate:?}: {what} it is not finite in f32");
            checked = Err(Error::Options { what });
        }
    };
    options.each(&mut |name, setting| match (name, setting) {
        ("weight_decay", Setting::Number(decay, _)) => check(rate * decay, "times weight_decay"),
        ("betas.0", Setting::Number(beta, _)) => check(rate / (1.0 - beta), "over 1 - betas.0"),
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
    (value, allowed): (f64, Allowed),
) -> Result<(), Error> {
    if allowed.allows(value) {
        return Ok(());
    }
    Err(Error::Options { what: format!("{of} {name} {value:?}: it must be {allowed}") })
}

/// A line for each option, each of which begins with `of`.
pub(super) fn lines(options: &impl OptimizerOptions, of: &dyn Display) -> impl Display {
    fmt::from_fn(move |f| {
        let mut written = Ok(());
        options.each(&mut |name, setting| {
            written = written.and_then(|()| match setting {
                Setting::Number(value, _) => writeln!(f, "{of} {name} {value:?}"),
                Setting::Count(count) => writeln!(f, "{of} {name} {count}"),
                Setting::Choice(value) => writeln!(f, "{of} {name} {value:?}"),
            });
        });
        written
    })
}

/// The options for a checkpoint.
pub(super) fn json(options: &impl OptimizerOptions) -> Value {
    let mut json = Map::new();
    options.each(&mut |name, setting| {
        let value = match setting {
            Setting::Number(value, _) => Value::from(value),
            Setting::Count(count) => Value::from(count),
            Setting::Choice(value) => Value::from(format!("{value:?}")),
        };
        json.insert(name.to_owned(), value);
    });
    // An optimizer of the program's own may list its rate under another name.
    let rate = *{ *options }.learning_rate();
    json.entry(RATE).or_insert(Value::from(rate));
    Value::Object(json)
}
