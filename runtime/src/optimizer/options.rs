//! The options of optimizers: checks, the comparison of ranks, and checkpoints.

use std::fmt::{self, Display};

use serde_json::{Map, Value};

use crate::error::Error;
use crate::optimizer::rule::Rule;
use crate::optimizer::setting::Setting;
use crate::options::allowed::{Allowed, in_f32};
use crate::persist::saved::RATE;

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
            checked = check_number(of, name, value, allowed);
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
