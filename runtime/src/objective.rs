//! What a step's gradient is the gradient of, and what a backward pass starts from.

use crate::error::Error;

/// What the finished gradient is the gradient of.
///
/// Let rank `r` bring in microbatch `m` a loss sum `s(r, m)` over `w(r, m)` items.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Objective {
    /// (sum of all `s`) / (sum of all `w`): exact for any split of the items. One division, at the end.
    #[default]
    WeightedMean,
    /// The mean over ranks, summed over microbatches, of each rank's own mean loss.
    ///
    /// This is what PyTorch's DDP and FSDP2 compute; weights do not enter it.
    RankMean,
    /// The sum of all `s`.
    Sum,
    /// The sum of all `s`, divided by a factor of the user's (FSDP2's custom divide factor).
    Factor(f64),
}

impl Objective {
    /// Refuses a factor by which nothing can be divided.
    pub(crate) fn check(self) -> Result<Self, Error> {
        match self {
            Self::Factor(factor) if !(factor.is_finite() && factor > 0.0) => Err(Error::Options {
                what: format!("objective Factor({factor}): a divide factor is finite and above 0"),
            }),
            objective => Ok(objective),
        }
    }

    /// Whether weights enter it.
    pub(crate) fn is_weighted(self) -> bool {
        self != Self::RankMean
    }
}

/// The loss of one microbatch on one rank: a sum over items, and how many (or how heavy) they are.
///
/// There is no mean in the interface on purpose: whoever has only a mean says how many items it
/// stands for, and the division happens once, in the runtime.
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
    /// A loss summed over items of total weight `weight` (items, tokens that are not ignored, ...).
    ///
    /// A weight of 0 says that there are no items: unless the objective is `RankMean`, gradients of that microbatch count
    /// as zeros, also where they are not finite.
    #[must_use]
    pub fn new(sum: f64, weight: u64) -> Self {
        Self { value: sum, weight, given_as: GivenAs::Sum }
    }

    /// A loss that is already a mean over items of total weight `weight`.
    #[must_use]
    pub fn from_mean(mean: f64, weight: u64) -> Self {
        Self { value: mean, weight, given_as: GivenAs::Mean }
    }

    /// The sum over the items; 0 where there are none, even if the mean of nothing came as NaN.
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

    /// The mean over the items; 0 where there are none.
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

    /// The total weight of the items.
    #[must_use]
    pub fn weight(self) -> u64 {
        self.weight
    }

    /// The derivative, with respect to the loss that the user holds, of this rank's term of the objective.
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

/// What the backward pass starts from: multiply the loss by it (or seed the backward with it).
///
/// It carries the weight (where the loss came as a mean), the loss scale, and the power of two that
/// keeps gradients on the wire at the size of a mean. The runtime divides all of it out again.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "the backward pass must start from the seed"]
pub struct Seed(pub(crate) f64);

impl Seed {
    /// The factor.
    #[must_use]
    pub fn value(self) -> f64 {
        self.0
    }
}
