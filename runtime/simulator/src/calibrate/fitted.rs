//! A number that was fitted.

use std::fmt;

use crate::machine::Number;

/// A number that was fitted.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// The number.
    pub number: Number,
    /// Its standard error, relative to its value: 0.02 is 2 %.
    pub standard_error: f64,
}

/// Standard errors beyond it are shown as more than it: the derivatives from which they follow hold near a number only.
const SHOWN: f64 = 10.0;

/// `0.61 +- 2.0 %`.
impl fmt::Display for Fitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, standard_error } = self;
        match *standard_error <= SHOWN {
            true => write!(f, "{number} +- {:.1} %", 100.0 * standard_error),
            false => write!(f, "{number} +- more than {:.0} %", 100.0 * SHOWN),
        }
    }
}
