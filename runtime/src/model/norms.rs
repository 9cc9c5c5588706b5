//! Norms and histograms by parameter, and the sums behind them.
//!
//! Replicas hold the same shards. Each rank sums the squares of the elements that it would write to
//! a checkpoint in f64, and one small all-reduce over the world, on the control channel, adds them
//! in rank order. So the bits are the same on all ranks.

use std::ops::{Range, RangeInclusive};

use hsdp_comm::{Part, PartKind, Reduction, Stage};
use hsdp_kernels::{Element, squared_norm};
use hsdp_sharding::{ParamId, Plan, Role};

use crate::error::Error;
use crate::state::context::Context;

/// A value of each parameter, in the order of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ByParameter<T> {
    values: Vec<(String, T)>,
}

/// A number of each parameter: a norm or a ratio of norms.
pub type Norms = ByParameter<f64>;

impl<T> ByParameter<T> {
    /// Returns the names and the values, in the order of the model.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.values.iter().map(|(name, value)| (name.as_str(), value))
    }

    fn find(&self, name: &str) -> Option<&T> {
        self.iter().find(|(it, _)| *it == name).map(|(_, value)| value)
    }
}

impl Norms {
    /// Returns the number of a parameter.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<f64> {
        self.find(name).copied()
    }

    /// Returns the root of the sum of all squares: of norms, the norm of all parameters together.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.iter().map(|(_, norm)| norm * norm).sum::<f64>().sqrt()
    }
}

pub(super) fn add_square(square: &mut [f64], elements: &[f32]) {
    square[0] += squared_norm(elements);
}

/// A part of a parameter: the parameter's number in the model, and a range of this rank's shard.
pub(super) type CountedPiece = (usize, Range<usize>);

/// Returns the pieces that this rank counts, by unit: those that it would write to a checkpoint. So
/// each element of the model counts on one rank.
pub(super) fn counted_pieces(context: &Context) -> Vec<Vec<CountedPiece>> {
    let mut units = vec![Vec::new(); context.plan.layouts().len()];
    for (unit, piece) in context.plan.pieces_saved_by(context.rank()) {
        let number = context.number_of(ParamId { unit, index: piece.param });
        units[unit.index()].push((number, piece.shard_range()));
    }
    units
}

/// Returns the pieces among the first `len` elements of a shard: trained parameters come first.
pub(super) fn within(pieces: &[CountedPiece], len: usize) -> impl Iterator<Item = CountedPiece> {
    pieces.iter().filter(move |(_, range)| range.end <= len).cloned()
}

/// Reduces values of all ranks, in rank order. They are of the model's parameters, or of another
/// part of it.
pub(super) fn over_ranks<T: Element>(
    context: &Context,
    step: u64,
    part: Option<PartKind>,
    by: Reduction,
    own: Vec<T>,
) -> Result<Vec<T>, Error> {
    let tag = context.tag(None, Stage::Export, step, 0);
    let tag = part.map_or(tag, |kind| tag.part(Part { kind, number: 0 }));
    context.control.all_reduce(tag, by, own)
}

/// Returns a value of each parameter whose role `has` accepts, of the sums of all parameters.
pub(super) fn by_parameter<S, T>(
    plan: &Plan,
    sums: &[S],
    has: impl Fn(Role) -> bool,
    value: impl Fn(&[S]) -> T,
) -> ByParameter<T> {
    let params = || plan.spec().units().iter().flat_map(|unit| &unit.params);
    let count = (sums.len() / params().count().max(1)).max(1);
    let with_sums = params().zip(sums.chunks_exact(count)).filter(|(param, _)| has(param.role));
    ByParameter { values: with_sums.map(|(param, it)| (param.name.clone(), value(it))).collect() }
}

/// Returns a value of each trainable parameter.
pub(super) fn trained<S, T>(plan: &Plan, sums: &[S], value: impl Fn(&[S]) -> T) -> ByParameter<T> {
    by_parameter(plan, sums, |role| role == Role::Trainable, value)
}

/// The exponents that have a count of their own.
const EXPONENTS: RangeInclusive<i32> = -40..=8;

/// The counts of a histogram: of zeros, of each exponent, and of elements that are not finite.
pub(super) const COUNTS: usize = 51;

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
    pub(super) fn of(counts: &[u64]) -> Self {
        Self { counts: counts.try_into().expect("so many for each parameter") }
    }

    /// Returns the number of elements that are zero.
    #[must_use]
    pub fn zeros(&self) -> u64 {
        self.counts[0]
    }

    /// Returns the number of elements that are infinite or NaN.
    #[must_use]
    pub fn not_finite(&self) -> u64 {
        self.counts[COUNTS - 1]
    }

    /// Exponents `e` from -40 to 8, and the number of elements whose absolute value is in `[2^e,
    /// 2^(e+1))`. The first count has all smaller elements too, but zeros, and the last all larger
    /// ones.
    pub fn by_exponent(&self) -> impl Iterator<Item = (i32, u64)> {
        EXPONENTS.zip(self.counts[1..].iter().copied())
    }
}

impl Histograms {
    /// Returns the histogram of a parameter.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Histogram> {
        self.find(name)
    }
}

pub(super) fn count(counts: &mut [u64], elements: impl Iterator<Item = f32>) {
    elements.for_each(|element| counts[place_of(element)] += 1);
}

/// Returns the index of an element's count.
fn place_of(element: f32) -> usize {
    if element == 0.0 || !element.is_finite() {
        return if element == 0.0 { 0 } else { COUNTS - 1 };
    }
    // The biased exponent, which is 0 for subnormal numbers: they are far below the first count.
    let biased = (element.to_bits() >> 23) & 0xff;
    (biased.saturating_sub(BELOW) as usize).clamp(1, COUNTS - 2)
}
