//! A number with its unit and the source that it is from.

#[cfg(test)]
mod tests;

use std::fmt;
use std::marker::PhantomData;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// A number of a machine: finite, in the range of its unit, with the source that it is from.
///
/// In a file: `{ value = "2039 GB/s", source = "NVIDIA A100 datasheet, 2021" }`. Displayed as its
/// value is written there, in the largest prefix that gives at least 1; the text is read as the
/// same number.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantity<M> {
    value: f64,
    source: String,
    measure: PhantomData<M>,
}

impl<M: Measure> Quantity<M> {
    /// Returns the value in the unit of `M`.
    #[must_use]
    pub const fn value(&self) -> f64 {
        self.value
    }

    fn read(text: &str, source: String) -> Result<Self, String> {
        let value = parse(text, &M::UNIT)?;
        check(value, &M::UNIT).map_err(|problem| format!("{text:?} {problem}"))?;
        if source.trim().is_empty() {
            return Err(format!("{text:?} has an empty source"));
        }
        Ok(Self { value, source, measure: PhantomData })
    }

    /// Returns the number without its type, to be shown or changed.
    pub(super) fn number_mut(&mut self, name: String) -> NumberMut<'_> {
        NumberMut { name, value: &mut self.value, source: &mut self.source, unit: M::UNIT }
    }
}

impl<M: Measure> fmt::Display for Quantity<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&text(self.value, &M::UNIT))
    }
}

impl<'de, M: Measure> Deserialize<'de> for Quantity<M> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let WrittenNumber { value, source } = WrittenNumber::deserialize(deserializer)?;
        Self::read(&value, source).map_err(D::Error::custom)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenNumber {
    value: String,
    source: String,
}

/// A number of a machine, of any measure.
pub(super) struct NumberMut<'a> {
    pub(super) name: String,
    pub(super) value: &'a mut f64,
    pub(super) source: &'a mut String,
    pub(super) unit: MeasureUnit,
}

/// Checks that `value` is physically possible. The problem is the rest of a sentence about the
/// value.
pub(super) fn check(value: f64, unit: &MeasureUnit) -> Result<(), String> {
    if !(unit.least..=unit.most).contains(&value) {
        let least = text(unit.least, unit);
        let most = text(unit.most, unit);
        return Err(format!("is not between {least} and {most}"));
    }
    match unit.is_whole && value.fract() != 0.0 {
        true => Err("is no whole number".into()),
        false => Ok(()),
    }
}

/// Returns the value of a text such as `2039 GB/s`.
fn parse(text: &str, unit: &MeasureUnit) -> Result<f64, String> {
    let (number, written) = text.split_once(' ').unwrap_or((text, ""));
    let value = scale(written, unit).and_then(|scale| match scale {
        UnitScale::Power(power) => decimal(number, power),
        UnitScale::Factor(factor) => Some(decimal(number, 0)? * factor),
    });
    value.ok_or_else(|| match unit.name {
        "" => format!("{text:?} is no plain number such as 0.85"),
        name => format!("{text:?} is no number with a unit such as {}{name}", unit.example()),
    })
}

enum UnitScale {
    Power(i32),
    Factor(f64),
}

/// Returns the factor from numbers of a unit, as it is written, to those of `unit`.
fn scale(written: &str, unit: &MeasureUnit) -> Option<UnitScale> {
    let prefix = written.strip_suffix(unit.name);
    let prefixed = unit.prefixes.iter().find(|(name, _)| Some(*name) == prefix);
    let other = || unit.others.iter().find(|(name, _)| *name == written);
    prefixed.map(|it| UnitScale::Power(it.1)).or_else(|| other().map(|it| UnitScale::Factor(it.1)))
}

/// Returns the float that is nearest to a decimal number times ten to the `power`; None if it is no
/// decimal number.
fn decimal(number: &str, power: i32) -> Option<f64> {
    let (mantissa, exponent) = number.split_once('e').unwrap_or((number, "0"));
    let exponent = exponent.parse::<i32>().ok()?.checked_add(power)?;
    let is_plain = mantissa.bytes().all(|it| it.is_ascii_digit() || it == b'.' || it == b'-');
    is_plain.then(|| format!("{mantissa}e{exponent}").parse().ok()).flatten()
}

/// Returns the shortest text that is read as `value`, with the largest prefix that gives at least
/// 1.
pub(super) fn text(value: f64, unit: &MeasureUnit) -> String {
    if unit.name.is_empty() {
        return value.to_string();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    let fitting = unit.prefixes.iter().filter(|(_, power)| *power <= exponent && value != 0.0);
    match fitting.max_by_key(|(_, power)| power) {
        Some((prefix, power)) => {
            format!("{} {prefix}{}", shifted(mantissa, exponent - power), unit.name)
        }
        None => format!("{value} {}", unit.name),
    }
}

/// Returns the digits of `mantissa`, `d.ddd`, with the point moved right by `places`.
fn shifted(mantissa: &str, places: i32) -> String {
    let mut digits = mantissa.replace('.', "");
    let point = 1 + usize::try_from(places).unwrap_or_default();
    match digits.len() > point {
        true => digits.insert(point, '.'),
        false => digits.extend(std::iter::repeat_n('0', point - digits.len())),
    }
    digits
}

/// The measure of a number of a machine.
#[derive(Clone, Copy, Debug)]
pub struct MeasureUnit {
    /// The unit of values, as it is displayed: `B/s`. Empty for plain numbers.
    pub name: &'static str,
    /// The values that are physically possible, in this unit.
    pub least: f64,
    /// The largest of them.
    pub most: f64,
    /// Whether only whole numbers are possible.
    pub is_whole: bool,
    /// Prefixes that the unit takes in texts, with the power of ten that each is.
    prefixes: &'static [(&'static str, i32)],
    /// Other units that texts may have, with the factor that leads to this one.
    others: &'static [(&'static str, f64)],
}

impl MeasureUnit {
    /// Returns a unit as texts have it, with the prefix in which it is common.
    const fn example(&self) -> &str {
        if self.least == 0.0 { "u" } else { "G" }
    }
}

const LARGE: &[(&str, i32)] =
    &[("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
const SMALL: &[(&str, i32)] = &[("", 0), ("m", -3), ("u", -6), ("n", -9), ("p", -12)];
const NONE: &[(&str, i32)] = &[("", 0)];

const KI: f64 = 1024.0;

/// The measure of a [`Quantity`](super::Quantity), as a type.
pub trait Measure: Clone + Copy + std::fmt::Debug + PartialEq {
    /// Its unit.
    const UNIT: MeasureUnit;
}

macro_rules! measures {
    ($($(#[$doc:meta])* $name:ident = $unit:expr;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq)]
            pub enum $name {}

            impl Measure for $name {
                const UNIT: MeasureUnit = $unit;
            }
        )*
    };
}

measures! {
    /// A number of things, at least 1.
    Count = MeasureUnit { name: "", least: 1.0, most: 1e6, is_whole: true, prefixes: NONE, others: &[] };
    /// A part of the whole, above 0 and at most 1.
    Ratio = MeasureUnit { name: "", least: 1e-6, most: 1.0, is_whole: false, prefixes: NONE, others: &[] };
    /// A duration in seconds.
    Seconds = MeasureUnit { name: "s", least: 0.0, most: 1.0, is_whole: false, prefixes: SMALL, others: &[] };
    /// Memory, in bytes.
    Bytes = MeasureUnit {
        name: "B",
        least: 1.0,
        most: 1e18,
        is_whole: false,
        prefixes: LARGE,
        others: &[("KiB", KI), ("MiB", KI * KI), ("GiB", KI * KI * KI), ("TiB", KI * KI * KI * KI)],
    };
    /// A bandwidth in bytes a second; texts may have bits, too.
    BytesPerSecond = MeasureUnit {
        name: "B/s",
        least: 1e3,
        most: 1e18,
        is_whole: false,
        prefixes: LARGE,
        others: &[
            ("KiB/s", KI),
            ("MiB/s", KI * KI),
            ("GiB/s", KI * KI * KI),
            ("Mb/s", 1e6 / 8.0),
            ("Gb/s", 1e9 / 8.0),
            ("Tb/s", 1e12 / 8.0),
        ],
    };
    /// Floating-point operations.
    Flop = MeasureUnit { name: "flop", least: 1.0, most: 1e18, is_whole: false, prefixes: LARGE, others: &[] };
    /// Floating-point operations a second.
    FlopPerSecond = MeasureUnit { name: "flop/s", least: 1e3, most: 1e21, is_whole: false, prefixes: LARGE, others: &[] };
}
