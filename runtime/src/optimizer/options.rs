//! The values that options of optimizers may have.

use std::fmt::Display;

use crate::error::Error;

/// The values that an option of an optimizer may have.
#[derive(Clone, Copy, Debug)]
pub(super) enum Allowed {
    /// Finite, and 0 or more.
    NotNegative,
    /// Finite, and above 0.
    Positive,
    /// From 0 to below 1.
    Fraction,
}

/// Refuses options of an optimizer or a group with which an update would destroy the parameters: each has a name and a value.
pub(super) fn check_options<const N: usize>(
    of: &dyn Display,
    options: [(&str, f64, Allowed); N],
) -> Result<(), Error> {
    for (name, value, allowed) in options {
        let (is_allowed, must) = match allowed {
            Allowed::NotNegative => (value.is_finite() && value >= 0.0, "finite, and 0 or more"),
            Allowed::Positive => (value.is_finite() && value > 0.0, "finite, and above 0"),
            Allowed::Fraction => ((0.0..1.0).contains(&value), "0 or more, and below 1"),
        };
        if !is_allowed {
            return Err(Error::Options {
                what: format!("{of} {name} {value:?}: it must be {must}"),
            });
        }
    }
    Ok(())
}
