//! The divide plan: the divisor of each collective, computed from the ranks, microbatches and dtype
//! that take part in it.
//!
//! The rule of the plan: *a partial has one scale*. The value that a reduce-scatter adds to the
//! partial does not depend on whether an all-reduce follows in the same microbatch.
//!
//! | objective | a partial is | the all-reduce multiplies by | the end of the step multiplies by |
//! |---|---|---|---|
//! | `RankMean` | (1/S) times the sum over the shard group | 1/R | 1/scale |
//! | others | the sum over the shard group | 1 | 1/(divisor x scale) |
//!
//! With an f16 wire each divisor is split: contributions are divided by a power of two before the
//! collective, so that no value overflows or underflows in f16, and the sum is divided by the rest.
//! f32 and bf16 have enough range without a split. The split near the square root follows
//! fairscale's pull request 565, which PyTorch adopted.

use hsdp_sharding::DType;

use crate::options::objective::Objective;

/// The ranks, microbatches and dtype that take part in the reductions of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parties {
    /// The dtype in which the collective moves gradients.
    pub wire: DType,
    /// Members of the shard group.
    pub shard_members: usize,
    /// Members of the replicate group; `None` where no all-reduce takes place.
    pub replicate_members: Option<usize>,
    /// Microbatches that a contribution to the reduce-scatter is a sum of: 1, except in mode
    /// `Local`.
    pub microbatches_in_contribution: usize,
    /// Microbatches that the partial is a sum of when it enters the all-reduce.
    pub microbatches_in_partial: usize,
    /// The objective whose gradient the step computes.
    pub objective: Objective,
}

/// A collective's divisors: one for each contribution before it, and one for the sum after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divides {
    /// The divisor of each contribution, before it is rounded to the wire dtype. Always a power of
    /// two.
    pub pre: f64,
    /// The divisor of the f32 sum.
    pub post: f64,
}

impl Divides {
    pub(crate) const NONE: Self = Self { pre: 1.0, post: 1.0 };

    /// Returns the product of both divisors.
    #[must_use]
    pub fn product(self) -> f64 {
        self.pre * self.post
    }

    /// Splits `divisor` into `pre` before the collective and the rest after it.
    fn split(divisor: f64, pre: f64) -> Self {
        Self { pre, post: divisor / pre }
    }
}

/// The divisors of a reduce-scatter and of the all-reduce that may follow it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DividePlan {
    /// The divisors of the reduce-scatter over the shard group.
    pub reduce_scatter: Divides,
    /// The divisors of the all-reduce over the replicate group; `None` without an all-reduce, or
    /// with one replica.
    pub all_reduce: Option<Divides>,
}

impl DividePlan {
    /// Computes the divisors for `parties`.
    #[must_use]
    pub fn of(parties: Parties) -> Self {
        Self {
            reduce_scatter: reduce_scatter(parties),
            all_reduce: parties
                .replicate_members
                .filter(|members| *members > 1)
                .map(|members| all_reduce(parties, members)),
        }
    }
}

fn reduce_scatter(parties: Parties) -> Divides {
    let members = parties.shard_members;
    if members == 1 {
        return Divides::NONE;
    }
    let divisor = match parties.objective {
        Objective::RankMean => as_f64(members),
        _ => 1.0,
    };
    let room = room_for(parties.microbatches_in_contribution);
    Divides::split(divisor, pre_divide(parties.wire, members, room))
}

fn all_reduce(parties: Parties, members: usize) -> Divides {
    let divisor = match parties.objective {
        Objective::RankMean => as_f64(members),
        _ => 1.0,
    };
    let summands = match parties.objective {
        Objective::RankMean => parties.microbatches_in_partial,
        // The partial is also a sum over the shard group, not a mean.
        _ => parties.microbatches_in_partial * parties.shard_members,
    };
    Divides::split(divisor, pre_divide(parties.wire, members, room_for(summands)))
}

/// Returns the power of two by which contributions are divided before the collective: near the
/// square root of the members, times `room`.
fn pre_divide(wire: DType, members: usize, room: f64) -> f64 {
    match wire {
        DType::F16 => near_root(members) * room,
        _ => 1.0,
    }
}

/// Returns the least power of two whose square is at least `members`.
fn near_root(members: usize) -> f64 {
    let mut root = 1_usize;
    while root * root < members {
        root *= 2;
    }
    as_f64(root)
}

/// Returns the largest power of two that is at most `summands`. Together with the root, which is at
/// least 2, it is enough. A larger value would lose precision at the bottom of the range, where f16
/// rounds to multiples of 2^-24.
fn room_for(summands: usize) -> f64 {
    as_f64(1 << summands.max(1).ilog2())
}

#[expect(clippy::cast_precision_loss, reason = "members and microbatches are far below 2^53")]
fn as_f64(count: usize) -> f64 {
    count as f64
}

/// Returns the divisor that remains for the finished sum, after all collectives.
///
/// Every seed was divided by two to the power of `exponent`, on which the ranks agree. `scale` is
/// the loss scale.
#[must_use]
#[expect(
    clippy::cast_precision_loss,
    reason = "weights up to 2^53 are exact; beyond, one rounding"
)]
pub fn final_divisor(objective: Objective, total_weight: u64, exponent: i32, scale: f64) -> f64 {
    let power = f64::powi(2.0, -exponent);
    match objective {
        Objective::WeightedMean => total_weight as f64 * power * scale,
        Objective::RankMean => scale,
        Objective::Sum => power * scale,
        Objective::Factor(factor) => factor * power * scale,
    }
}

/// Returns the power of two that is taken out of every seed, where it is known before the first
/// loss.
pub(crate) fn exponent_known_early(objective: Objective, largest_hint: u64) -> Option<i32> {
    match (objective, largest_hint) {
        (Objective::RankMean, _) => Some(0),
        (_, 0) => None,
        (_, hint) => Some(exponent_of(hint)),
    }
}

/// Returns the power of two next below a weight.
pub(crate) fn exponent_of(weight: u64) -> i32 {
    weight.checked_ilog2().map_or(0, |exponent| exponent.try_into().unwrap_or(0))
}

#[cfg(test)]
mod tests;
