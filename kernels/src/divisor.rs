//! Division by a number that is the same for many elements.

use crate::error::Error;
use crate::map::{Multiply, Quotient};
use crate::round::nearest_f32;

/// A finite divisor greater than zero.
///
/// Dividing by it always gives the bits of IEEE division. Where the reciprocal is exact (powers of two), kernels
/// multiply by it, which gives the same bits in less time.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Divisor(f32);

/// How a kernel divides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Scale {
    /// Not at all: the divisor is one.
    None,
    /// By the exact reciprocal.
    Multiply(Multiply),
    /// By division.
    Divide(Quotient),
}

impl Divisor {
    /// Divides nothing.
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

    /// Its value.
    pub const fn value(self) -> f32 {
        self.0
    }

    /// Whether it divides nothing.
    pub fn is_one(self) -> bool {
        self == Self::ONE
    }

    /// `value` divided.
    pub fn divide(self, value: f32) -> f32 {
        value / self.0
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

impl Default for Divisor {
    fn default() -> Self {
        Self::ONE
    }
}

impl TryFrom<f32> for Divisor {
    type Error = Error;

    fn try_from(value: f32) -> Result<Self, Error> {
        Self::new(value)
    }
}

/// The reciprocal of a power of two, where it is finite and as normal as the number itself: multiplying by it rounds the
/// very number that dividing would round.
pub(crate) fn exact_reciprocal(value: f64) -> Option<f64> {
    const FRACTION: u64 = (1 << (f64::MANTISSA_DIGITS - 1)) - 1;
    let power_of_two = value.is_normal() && value.to_bits() & FRACTION == 0;
    let reciprocal = value.recip();
    (power_of_two && reciprocal.is_normal()).then_some(reciprocal)
}

#[cfg(test)]
mod tests;
