//! The options of optimizers: their names, their values, and the values that they may have.

use std::fmt::{self, Debug, Display};

use serde_json::{Map, Value};

use crate::error::Error;

/// The options of a kind of optimizer.
pub trait OptimizerOptions: Copy + Debug + Send + Sync + 'static {
    /// The kind of optimizer, as errors and checkpoints name it.
    const KIND: &'static str;

    /// The learning rate.
    fn learning_rate(&mut self) -> &mut f64;

    /// Calls `see` for each option, with its name and its value. Errors, checkpoints and the comparison of ranks name them so.
    fn each(&self, see: &mut dyn FnMut(&'static str, Setting<'_>));
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

/// The numbers that an option of an optimizer may be. Others would destroy the parameters: an update with them is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Finite.
    Finite,
    /// Finite, and 0 or more.
    NotNegative,
    /// Finite, and 0 or less.
    NotPositive,
    /// Finite, and above 0, also in f32.
    Positive,
    /// Finite, and above 0, and the square is so in f32.
    PositiveSquare,
    /// From 0 to below 1.
    Fraction,
}

impl Allowed {
    fn allows(self, value: f64) -> bool {
        match self {
            Self::Finite => value.is_finite(),
            Self::NotNegative => value.is_finite() && value >= 0.0,
            Self::NotPositive => value.is_finite() && value <= 0.0,
            Self::Positive => value.is_finite() && is_positive_in_f32(value),
            Self::PositiveSquare => value > 0.0 && Self::Positive.allows(value * value),
            Self::Fraction => (0.0..1.0).contains(&value),
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "that is the question")]
fn is_positive_in_f32(value: f64) -> bool {
    value as f32 > 0.0
}

impl Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Finite => "finite",
            Self::NotNegative => "finite, and 0 or more",
            Self::NotPositive => "finite, and 0 or less",
            Self::Positive => "finite, and above 0 in f32",
            Self::PositiveSquare => "finite, and above 0, also its square in f32",
            Self::Fraction => "0 or more, and below 1",
        })
    }
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
    Value::Object(json)
}
