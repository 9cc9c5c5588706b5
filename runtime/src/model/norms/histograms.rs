//! Counts of elements by the size of their absolute value.

use std::ops::RangeInclusive;

use crate::error::Error;
use crate::model::ShardedModel;
use crate::model::norms::{ByParameter, by_parameter, trained};
use crate::step::gradients::Gradients;

/// The exponents that have a count of their own.
const EXPONENTS: RangeInclusive<i32> = -40..=8;

/// The counts of a histogram: of zeros, of each exponent, and of elements that are not finite.
const COUNTS: usize = 51;

/// The biased exponent of f32 below that of the first exponent with a count.
const BELOW: u32 = 127 - 40 - 1;

/// A histogram of each parameter.
pub type Histograms = ByParameter<Histogram>;

/// The counts of the elements of a parameter, by the power of two of their absolute value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; COUNTS],
}

impl Histogram {
    fn of(counts: &[u64]) -> Self {
        Self { counts: counts.try_into().expect("so many for each parameter") }
    }

    /// The number of elements that are zero.
    #[must_use]
    pub fn zeros(&self) -> u64 {
        self.counts[0]
    }

    /// The number of elements that are infinite or NaN.
    #[must_use]
    pub fn not_finite(&self) -> u64 {
        self.counts[COUNTS - 1]
    }

    /// Exponents `e` from -40 to 8, and the number of elements whose absolute value is in `[2^e, 2^(e+1))`. The first count has all
    /// smaller elements too, but zeros, and the last all larger ones.
    pub fn by_exponent(&self) -> impl Iterator<Item = (i32, u64)> {
        EXPONENTS.zip(self.counts[1..].iter().copied())
    }
}

impl Histograms {
    /// The histogram of a parameter.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Histogram> {
        self.find(name)
    }
}

impl Gradients {
    /// A histogram of the gradient of each trainable parameter, over all shards, divided, before clipping. Gradients on a device are
    /// copied to the host.
    ///
    /// Collective over the shard group: one all-reduce of 51 u64 for each parameter.
    ///
    /// # Errors
    /// As [`norms`](Self::norms).
    pub fn histograms(&self, model: &ShardedModel) -> Result<Histograms, Error> {
        #[expect(clippy::cast_possible_truncation, reason = "a gradient is f32")]
        let divide = |sum: &f32| (f64::from(*sum) / self.divisor) as f32;
        let count = |counts: &mut [u64], sums: &[f32]| count(counts, sums.iter().map(divide));
        Ok(trained(model, &self.summed(model, COUNTS, count)?, Histogram::of))
    }
}

impl ShardedModel {
    /// A histogram of the values of each parameter, also of frozen ones, over all shards. Parameters on a device are copied to the host.
    ///
    /// Collective over the shard group, outside of steps: one all-reduce of 51 u64 for each parameter.
    ///
    /// # Errors
    /// As [`norms`](Self::norms).
    pub fn histograms(&self) -> Result<Histograms, Error> {
        let count = |counts: &mut [u64], values: &[f32]| count(counts, values.iter().copied());
        Ok(by_parameter(self, &self.summed(COUNTS, count)?, |_| true, Histogram::of))
    }
}

fn count(counts: &mut [u64], elements: impl Iterator<Item = f32>) {
    elements.for_each(|element| counts[place_of(element)] += 1);
}

/// The index of an element's count.
fn place_of(element: f32) -> usize {
    if element == 0.0 || !element.is_finite() {
        return if element == 0.0 { 0 } else { COUNTS - 1 };
    }
    // The biased exponent, which is 0 for subnormal numbers: they are far below the first count.
    let biased = (element.to_bits() >> 23) & 0xff;
    (biased.saturating_sub(BELOW) as usize).clamp(1, COUNTS - 2)
}
