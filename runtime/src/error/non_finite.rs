//! The origin of a gradient that is not finite, in the form of the error.

use std::fmt;

use hsdp_sharding::Rank;

/// Why a step's gradient, or its loss, is not finite: the first parameter, rank and microbatch.
#[derive(Clone, Debug, PartialEq)]
pub struct NonFiniteGradient {
    /// The step.
    pub step: u64,
    /// The first value that was found not to be finite.
    pub origin: Origin,
}

/// The operation whose result was the first that is not finite.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Origin {
    /// A rank's own gradient holds an infinity, a NaN, or a value that the wire dtype rounds to an
    /// infinity.
    Gradient {
        /// The parameter.
        parameter: String,
        /// The rank.
        rank: Rank,
        /// The microbatch.
        microbatch: usize,
    },
    /// The contributions are finite, but their sum over ranks and microbatches is not.
    Sum {
        /// The parameter.
        parameter: String,
        /// The rank that holds the sum.
        rank: Rank,
        /// The microbatch after which the sum is not finite; `None` for the all-reduce over the
        /// replicas.
        microbatch: Option<usize>,
    },
    /// The sum is finite, but the divisor is so small that the quotient may not be finite in f32.
    Division {
        /// The norm before the division.
        norm: f64,
        /// The divisor.
        divisor: f64,
    },
    /// The gradient is finite, but the loss is not: the sum over the microbatches of this rank, or
    /// the running sum over the ranks up to this one.
    Loss {
        /// The first such rank.
        rank: Rank,
    },
}

impl fmt::Display for NonFiniteGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.step;
        match &self.origin {
            Origin::Gradient { parameter, rank, microbatch } => write!(
                f,
                "step {step}: the gradient of {parameter} on rank {rank} in microbatch \
                 {microbatch} is not finite"
            ),
            Origin::Sum { parameter, rank, microbatch: Some(microbatch) } => write!(
                f,
                "step {step}: the sum of the gradients of {parameter} is not finite after \
                 microbatch {microbatch} on rank {rank}, though each of them is"
            ),
            Origin::Sum { parameter, rank, microbatch: None } => write!(
                f,
                "step {step}: the sum over the replicas of the gradients of {parameter} is not \
                 finite on rank {rank}, though each of them is"
            ),
            Origin::Loss { rank } => {
                write!(f, "step {step}: the loss of rank {rank} is not finite")
            }
            Origin::Division { norm, divisor } => {
                write!(
                    f,
                    "step {step}: a gradient of norm {norm:e} is not finite when divided by \
                     {divisor:e}"
                )
            }
        }
    }
}
