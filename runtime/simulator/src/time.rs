//! Times, in whole picoseconds.

use std::fmt;
use std::ops::{Add, AddAssign, Mul};

#[cfg(test)]
mod tests;

/// Picoseconds of a second.
const SECOND: u64 = 1_000_000_000_000;

/// A duration, or a moment after the start of a simulation, in whole picoseconds: sums do not
/// depend on their order.
///
/// Sums and products saturate, so [`MAX`](Self::MAX), 213 days, stands for that time or any longer
/// one.
///
/// Displayed with four digits in the largest unit that gives at least 1: `0 s`, `12.34 us`, `1.5
/// ms`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// No time.
    pub const ZERO: Self = Self(0);
    /// The longest time.
    pub const MAX: Self = Self(u64::MAX);

    /// Returns a time of `picoseconds`.
    #[must_use]
    pub const fn from_picoseconds(picoseconds: u64) -> Self {
        Self(picoseconds)
    }

    /// Returns a time of `seconds`, rounded to the nearest picosecond, or `None` if it is negative,
    /// infinite, not a number, or longer than [`MAX`](Self::MAX).
    #[must_use]
    pub fn from_seconds(seconds: f64) -> Option<Self> {
        let picoseconds = (seconds * SECOND as f64).round();
        // The cast below is exact in this range: 2^64, the float that `u64::MAX` becomes, is
        // outside.
        (0.0..u64::MAX as f64).contains(&picoseconds).then_some(())?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "see above")]
        Some(Self(picoseconds as u64))
    }

    /// Returns a time of `seconds`, or the longest one. No number of a machine makes `seconds`
    /// negative or undefined.
    pub(crate) fn saturating(seconds: f64) -> Self {
        Self::from_seconds(seconds).unwrap_or(Self::MAX)
    }

    /// Returns the time in picoseconds.
    #[must_use]
    pub const fn picoseconds(self) -> u64 {
        self.0
    }

    /// Returns the time in seconds.
    #[must_use]
    pub fn seconds(self) -> f64 {
        self.0 as f64 / SECOND as f64
    }

    /// Returns the difference; [`ZERO`](Self::ZERO) if `other` is the longer one.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Add for Time {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Time {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<u64> for Time {
    type Output = Self;

    fn mul(self, count: u64) -> Self {
        Self(self.0.saturating_mul(count))
    }
}

/// Units by their picoseconds, the largest first.
const UNITS: [(u64, &str); 5] =
    [(SECOND, "s"), (1_000_000_000, "ms"), (1_000_000, "us"), (1_000, "ns"), (1, "ps")];

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fitting = UNITS.into_iter().find(|(picoseconds, _)| self.0 >= *picoseconds);
        let Some((picoseconds, unit)) = fitting else { return f.pad("0 s") };
        let number = self.0 as f64 / picoseconds as f64;
        let whole_digits = (self.0 / picoseconds).ilog10() as usize + 1;
        let text = format!("{number:.*}", 4_usize.saturating_sub(whole_digits));
        let short = match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.'),
            false => &text,
        };
        f.pad(&format!("{short} {unit}"))
    }
}
