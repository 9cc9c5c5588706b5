//! The objective whose gradient a step computes, and the seed of a backward pass.

use crate::error::Error;
use crate::options::allowed::is_positive_in_f32;

/// The function whose gradient a step computes.
///
/// Rank `r` has in microbatch `m` the loss sum `s(r, m)` over `w(r, m)` items.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Objective {
    /// (sum of all `s`) / (sum of all `w`): exact for any split of the items. It is divided once,
    /// at the end.
    #[default]
    WeightedMean,
    /// The mean over ranks, summed over microbatches, of each rank's own mean loss.
    ///
    /// PyTorch's DDP and FSDP2 compute this. Weights do not affect the mean over ranks.
    RankMean,
    /// The sum of all `s`.
    Sum,
    /// The sum of all `s`, divided by a factor of the caller (FSDP2's custom divide factor), which
    /// must be finite and above 0 in f32.
    Factor(f64),
}

impl Objective {
    /// Refuses a factor that is not finite and above 0 in f32.
    pub(crate) fn check(self) -> Result<Self, Error> {
        match self {
            Self::Factor(factor) if !is_positive_in_f32(factor) => Err(Error::Options {
                what: format!(
                    "objective Factor({factor}): a divide factor must be finite and above 0 in f32"
                ),
            }),
            objective => Ok(objective),
        }
    }

    /// Returns whether weights enter the objective.
    pub(crate) fn is_weighted(self) -> bool {
        self != Self::RankMean
    }
}

/// The loss of one microbatch on one rank: a sum over items, and the number (or total weight) of
/// the items.
///
/// A mean alone is not accepted: a mean comes with the weight of its items, and the runtime divides
/// once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossSum {
    value: f64,
    weight: u64,
    given_as: GivenAs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GivenAs {
    Sum,
    Mean,
}

impl LossSum {
    /// Returns a loss that is a sum over items of total weight `weight` (the number of samples, or
    /// of tokens that are not ignored).
    ///
    /// A weight of 0 means that there are no items: unless the objective is `RankMean`, the
    /// gradients of that microbatch count as zeros, even if they are not finite.
    #[must_use]
    pub fn new(sum: f64, weight: u64) -> Self {
        Self { value: sum, weight, given_as: GivenAs::Sum }
    }

    /// Returns a loss that is already a mean over items of total weight `weight`.
    #[must_use]
    pub fn from_mean(mean: f64, weight: u64) -> Self {
        Self { value: mean, weight, given_as: GivenAs::Mean }
    }

    /// Returns the sum over the items; 0 without items, even if the value is NaN.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "a loss is reported, weights are summed as integers"
    )]
    pub fn sum(self) -> f64 {
        match self.given_as {
            _ if self.weight == 0 => 0.0,
            GivenAs::Sum => self.value,
            GivenAs::Mean => self.value * self.weight as f64,
        }
    }

    /// Returns the mean over the items; 0 without items.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "a loss is reported, weights are summed as integers"
    )]
    pub fn mean(self) -> f64 {
        match self.given_as {
            _ if self.weight == 0 => 0.0,
            GivenAs::Sum => self.value / self.weight as f64,
            GivenAs::Mean => self.value,
        }
    }

    /// Returns the total weight of the items.
    #[must_use]
    pub fn weight(self) -> u64 {
        self.weight
    }

    /// Returns the derivative of this rank's term of the objective with respect to the loss in the
    /// form in which the caller gave it.
    #[expect(
        clippy::cast_precision_loss,
        reason = "weights up to 2^53 are exact; beyond, the seed is rounded once"
    )]
    pub(crate) fn sensitivity(self, objective: Objective) -> f64 {
        match (objective, self.given_as) {
            (Objective::RankMean, GivenAs::Mean) => 1.0,
            (Objective::RankMean, GivenAs::Sum) => 1.0 / self.weight.max(1) as f64,
            (_, GivenAs::Mean) => self.weight as f64,
            (_, GivenAs::Sum) => 1.0,
        }
    }
}

/// The factor with which a backward pass starts: multiply the loss by it, or use it as the gradient
/// of the loss.
///
/// It is the product of the weight (if the loss was given as a mean), the loss scale, and the power
/// of two that keeps gradients on the wire at the size of a mean. The runtime divides the gradients
/// by the same factors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "the backward pass must start from the seed"]
pub struct Seed {
    pub(crate) value: f64,
    pub(crate) loss_scale: f64,
}

impl Seed {
    /// Returns the factor as a number.
    #[must_use]
    pub fn value(self) -> f64 {
        self.value
    }

    /// Returns the loss scale, one of the seed's factors. An autograd that computes in 16 bits may
    /// begin with it alone, and multiply the gradients of parameters by the rest in f32, so that no
    /// weight is rounded or out of range.
    #[must_use]
    pub fn loss_scale(self) -> f64 {
        self.loss_scale
    }
}
