//! How far predictions are from measurements: what docs/simulator.md states, in one place. A test
//! compares both.

use crate::calibrate::FITTED;
use crate::{Machine, StepRow};

/// A stated error of predictions. Two steps whose predictions differ by less than it cannot be told
/// apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StatedError {
    /// The largest relative error of predictions beside the measurements that are the most alike:
    /// 0.062 is 6.2 %.
    pub relative: f64,
    /// The steps for which it is stated, in words.
    pub of: &'static str,
}

impl StatedError {
    /// Cards that were fitted to measured steps, on one machine.
    pub const NODE: Self =
        Self { relative: 0.062, of: "cards that were fitted to steps, on one machine" };
    /// Cores that were fitted to measured steps.
    pub const CORES: Self = Self { relative: 0.155, of: "cores that were fitted to steps" };
    /// All others.
    pub const OTHERS: Self =
        Self { relative: 0.202, of: "several machines, or numbers that were fitted to no steps" };

    /// All of them.
    pub const ALL: [Self; 3] = [Self::NODE, Self::CORES, Self::OTHERS];

    /// Returns how many times a speed is behind the fastest by this error: 0 if both tie.
    #[must_use]
    pub fn band(&self, speed: f64, fastest: f64) -> u32 {
        let mut band = 0;
        let mut least = self.floor(fastest);
        while speed < least && band < MOST_BANDS {
            band += 1;
            least = self.floor(least);
        }
        band
    }

    /// Returns the least speed that ties with one.
    #[must_use]
    pub fn floor(&self, speed: f64) -> f64 {
        speed / (1.0 + self.relative)
    }
}

/// Speeds further behind are in one band.
const MOST_BANDS: u32 = 1000;

impl Machine {
    /// Returns whether the source of each number that `hsdp calibrate` fits to steps begins with
    /// `fitted to`, as sources of fits do.
    #[must_use]
    pub fn is_fitted(&self) -> bool {
        let numbers = self.numbers();
        let is_fitted = |name: &&str| {
            numbers.iter().any(|it| it.name == *name && it.source.starts_with(FITTED))
        };
        StepRow::numbers(self).iter().all(is_fitted)
    }

    /// Returns the error that docs/simulator.md states for steps of a number of ranks.
    #[must_use]
    pub fn stated_error(&self, ranks: usize) -> StatedError {
        match (self.is_fitted(), self.device()) {
            (true, None) => StatedError::CORES,
            (true, Some(_)) if ranks <= self.cards() => StatedError::NODE,
            _ => StatedError::OTHERS,
        }
    }
}
