//! The numbers that an option may be.

use std::fmt::{self, Display};

/// The numbers that an option of an optimizer may be. Others would destroy the parameters, or mean
/// something else in f32, in which an update computes: an update with them is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Finite in f32.
    Finite,
    /// Finite in f32, and 0 or more.
    NotNegative,
    /// Finite in f32, and 0 or less.
    NotPositive,
    /// Finite and above 0 in f32.
    Positive,
    /// Above 0, and its square is finite and above 0 in f32.
    PositiveSquare,
    /// From 0 to below 1.
    Fraction,
}

impl Allowed {
    pub(crate) fn allows(self, value: f64) -> bool {
        match self {
            Self::Finite => in_f32(value).is_finite(),
            Self::NotNegative => in_f32(value).is_finite() && value >= 0.0,
            Self::NotPositive => in_f32(value).is_finite() && value <= 0.0,
            Self::Positive => is_positive_in_f32(value),
            Self::PositiveSquare => value > 0.0 && Self::Positive.allows(value * value),
            Self::Fraction => (0.0..1.0).contains(&value),
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "that is the question")]
pub(crate) fn in_f32(value: f64) -> f32 {
    value as f32
}

/// Whether a number is finite and above 0 in f32.
pub(crate) fn is_positive_in_f32(value: f64) -> bool {
    in_f32(value).is_finite() && in_f32(value) > 0.0
}

/// Whether a number is 0 or more, finite in f32, and 0 there only if it is 0.
pub(crate) fn is_held_in_f32(value: f64) -> bool {
    value == 0.0 || is_positive_in_f32(value)
}

impl Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Finite => "finite in f32",
            Self::NotNegative => "finite in f32, and 0 or more",
            Self::NotPositive => "finite in f32, and 0 or less",
            Self::Positive => "finite and above 0 in f32",
            Self::PositiveSquare => "above 0, and its square finite and above 0 in f32",
            Self::Fraction => "0 or more, and below 1",
        })
    }
}
