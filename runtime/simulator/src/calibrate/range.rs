//! The range of a fitted number. A fit moves the logarithm of a number, its place.

use std::ops::RangeInclusive;

use crate::machine::Unit;

/// The possible values of a number, and those at which fits begin.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Range {
    values: RangeInclusive<f64>,
    is_part: bool,
}

/// No duration that counts is shorter, in seconds.
const LEAST: f64 = 1e-12;
/// A number with a unit may be wrong by this factor.
const FACTOR: f64 = 12.0;
/// The part of a peak that is reached is seldom smaller.
const PART: f64 = 0.15;
/// A number that is as near to the end of its range, by its logarithm, would leave it.
const NEAR: f64 = 1e-3;

impl Range {
    pub(super) fn new(unit: &Unit) -> Self {
        let is_part = unit.name.is_empty() && !unit.is_whole;
        Self { values: unit.least.max(LEAST)..=unit.most, is_part }
    }

    pub(super) fn place(&self, value: f64) -> f64 {
        value.clamp(*self.values.start(), *self.values.end()).ln()
    }

    /// The value at a place.
    pub(super) fn value(&self, place: f64) -> f64 {
        place.exp().clamp(*self.values.start(), *self.values.end())
    }

    /// The first and the last place.
    pub(super) fn ends(&self) -> [f64; 2] {
        [self.values.start().ln(), self.values.end().ln()]
    }

    /// A place for a start, `way` of the distance from the lowest to the highest that are worth a try.
    pub(super) fn start(&self, own: f64, way: f64) -> f64 {
        let distance = FACTOR.ln();
        let [low, high] = match self.is_part {
            true => [PART.ln(), self.ends()[1]],
            false => [own - distance, own + distance],
        };
        let [least, most] = self.ends();
        (high - low).mul_add(way, low).clamp(least, most)
    }

    /// Whether a place is at an end of the range.
    pub(super) fn is_at_end(&self, place: f64) -> bool {
        let [least, most] = self.ends();
        place < least + NEAR || place > most - NEAR
    }
}
