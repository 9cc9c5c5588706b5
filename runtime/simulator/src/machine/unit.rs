//! The units of a machine's numbers: their names, prefixes and ranges.

use std::ops::RangeInclusive;

/// The measure of a number of a machine.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// The unit of values, as it is displayed: `B/s`. Empty for plain numbers.
    pub name: &'static str,
    /// The values that are physically possible, in this unit.
    pub least: f64,
    /// The largest of them.
    pub most: f64,
    /// Whether only whole numbers are possible.
    pub is_whole: bool,
    /// Prefixes that the unit takes in texts, with the power of ten that each is.
    pub(super) prefixes: &'static [(&'static str, i32)],
    /// Other units that texts may have, with the factor that leads to this one.
    pub(super) others: &'static [(&'static str, f64)],
}

impl Unit {
    /// A unit as texts have it, with the prefix in which it is common.
    pub(super) const fn example(&self) -> &str {
        if self.least == 0.0 { "u" } else { "G" }
    }

    /// Its possible values.
    #[must_use]
    pub const fn range(&self) -> RangeInclusive<f64> {
        self.least..=self.most
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
    const UNIT: Unit;
}

macro_rules! measures {
    ($($(#[$doc:meta])* $name:ident = $unit:expr;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq)]
            pub enum $name {}

            impl Measure for $name {
                const UNIT: Unit = $unit;
            }
        )*
    };
}

measures! {
    /// A number of things, at least 1.
    Count = Unit { name: "", least: 1.0, most: 1e6, is_whole: true, prefixes: NONE, others: &[] };
    /// A part of the whole, above 0 and at most 1.
    Ratio = Unit { name: "", least: 1e-6, most: 1.0, is_whole: false, prefixes: NONE, others: &[] };
    /// A duration in seconds.
    Seconds = Unit { name: "s", least: 0.0, most: 1.0, is_whole: false, prefixes: SMALL, others: &[] };
    /// Memory, in bytes.
    Bytes = Unit {
        name: "B",
        least: 1.0,
        most: 1e18,
        is_whole: false,
        prefixes: LARGE,
        others: &[("KiB", KI), ("MiB", KI * KI), ("GiB", KI * KI * KI), ("TiB", KI * KI * KI * KI)],
    };
    /// A bandwidth in bytes a second; texts may have bits, too.
    BytesPerSecond = Unit {
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
    Flop = Unit { name: "flop", least: 1.0, most: 1e18, is_whole: false, prefixes: LARGE, others: &[] };
    /// Floating-point operations a second.
    FlopPerSecond = Unit { name: "flop/s", least: 1e3, most: 1e21, is_whole: false, prefixes: LARGE, others: &[] };
}
