//! The errors of predictions.

use crate::Time;

/// The errors of predictions beside measurements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Errors {
    /// By measurement: `predicted / measured - 1`.
    pub relative: Vec<f64>,
}

impl Errors {
    /// The errors of pairs of a predicted and a measured time. A measured time of 0 has an infinite error.
    #[must_use]
    pub fn of(pairs: impl IntoIterator<Item = (Time, Time)>) -> Self {
        let relative = |(predicted, measured): (Time, Time)| match measured {
            Time::ZERO => f64::INFINITY,
            measured => predicted.seconds() / measured.seconds() - 1.0,
        };
        Self { relative: pairs.into_iter().map(relative).collect() }
    }

    /// The mean of their absolute values; 0 if there are none.
    #[must_use]
    pub fn mean(&self) -> f64 {
        let sum: f64 = self.relative.iter().map(|error| error.abs()).sum();
        sum / self.relative.len().max(1) as f64
    }

    /// The largest of their absolute values; 0 if there are none.
    #[must_use]
    pub fn worst(&self) -> f64 {
        self.relative.iter().fold(0.0, |worst, error| error.abs().max(worst))
    }
}
