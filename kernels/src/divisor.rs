//! Division of many elements by one number.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::map::{Multiply, Quotient};
use crate::round::nearest_f32;

/// A finite divisor greater than zero.
///
/// Division always gives the bits of IEEE division in f32. Where the reciprocal is exact (powers of
/// two), kernels multiply by the reciprocal, which gives the same bits in less time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f32", into = "f32")]
pub struct Divisor(f32);

/// The way in which a kernel divides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Scale {
    /// It does nothing, since the divisor is 1.
    None,
    /// It multiplies by the exact reciprocal.
    Multiply(Multiply),
    /// It divides.
    Divide(Quotient),
}

impl Divisor {
    /// The divisor 1, which changes nothing.
    pub const ONE: Self = Self(1.0);

    /// A divisor of this value.
    ///
    /// # Errors
    ///
    /// [`Error::Divisor`] if `value` is zero, negative, infinite or NaN.
    pub fn new(value: f32) -> Result<Self, Error> {
        if value.is_finite() && value > 0.0 {
            Ok(Self(value))
        } else {
            Err(Error::Divisor { value })
        }
    }

    /// The value of the divisor.
    pub const fn value(self) -> f32 {
        self.0
    }

    /// Whether the divisor is 1.
    pub fn is_one(self) -> bool {
        self == Self::ONE
    }

    /// The cheapest way to divide that gives the bits of a division.
    pub(crate) fn scale(self) -> Scale {
        if self.is_one() {
            return Scale::None;
        }
        match exact_reciprocal(f64::from(self.0)).map(nearest_f32) {
            Some(reciprocal) if reciprocal.is_finite() => Scale::Multiply(Multiply(reciprocal)),
            _ => Scale::Divide(Quotient(self.0)),
        }
    }
}

impl TryFrom<f32> for Divisor {
    type Error = Error;

    fn try_from(value: f32) -> Result<Self, Error> {
        Self::new(value)
    }
}

impl From<Divisor> for f32 {
    fn from(divisor: Divisor) -> Self {
        divisor.0
    }
}

/// The reciprocal of `value`, if `value` is a power of two and both are normal numbers. A
/// multiplication by it then rounds the same exact quotient as a division.
pub(crate) fn exact_reciprocal(value: f64) -> Option<f64> {
    const FRACTION: u64 = (1 << (f64::MANTISSA_DIGITS - 1)) - 1;
    let power_of_two = value.is_normal() && value.to_bits() & FRACTION == 0;
    let reciprocal = value.recip();
    (power_of_two && reciprocal.is_normal()).then_some(reciprocal)
}

#[cfg(test)]
mod tests;
