//! Errors of gradients that are not finite, or missing.

use std::fmt;

use hsdp_sharding::Rank;

/// Gradients that are not those of a step. No parameter has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GradientError {
    /// A gradient or the loss is not finite, and the model's options do not skip such steps. No
    /// parameter has changed.
    #[error("{0}")]
    NonFinite(NonFiniteGradient),
    /// Trainable parameters got no gradient on any rank in the first step. No parameter has
    /// changed. See [`Unused::ErrorInFirstStep`](crate::Unused::ErrorInFirstStep).
    #[error(
        "step {step}: {}. Either an operation without a backward or a detach cuts the graph between \
         them and the loss, or the loss does not depend on them, or they are buffers (running \
         statistics, say) that are declared as parameters{causes}. If they need no gradient, freeze \
         them, or choose Unused::Warn or Unused::Zeros",
        Without::of(.parameters, *.trainable)
    )]
    WithoutGradient {
        /// The step.
        step: u64,
        /// The number of trainable parameters of the model.
        trainable: usize,
        /// The names of all parameters without a gradient. The message lists the first 100 of them.
        parameters: Vec<String>,
        /// Details of the causes, where the adapter of an autograd names them; otherwise empty. A
        /// rank without data in all steps so far has none.
        causes: String,
    },
    /// [`Unused::ErrorOnAnyRank`](crate::Unused::ErrorOnAnyRank): trainable parameters got no
    /// gradient on some ranks.
    #[error("step {step}: {}{causes}", unused(.parameters))]
    UnusedParameters {
        /// The step.
        step: u64,
        /// The names of all such parameters, each with the ranks on which it got no gradient.
        parameters: Vec<(String, Vec<usize>)>,
        /// The usual causes, where the adapter of an autograd names them; otherwise empty.
        causes: String,
    },
}

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

/// Returns `parameter a got no gradient on ranks [0, 1]; parameter b got no gradient on ranks [1]`.
fn unused(parameters: &[(String, Vec<usize>)]) -> String {
    let each = |(name, ranks): &(String, Vec<usize>)| {
        format!("parameter {name} got no gradient on ranks {ranks:?}")
    };
    parameters.iter().map(each).collect::<Vec<_>>().join("; ")
}

/// `2 of 6 trainable parameters got no gradient on any rank: a, b`
pub(crate) struct Without<'a> {
    parameters: &'a [String],
    trainable: usize,
}

impl<'a> Without<'a> {
    /// Number of names that a text lists.
    const LISTED: usize = 100;

    pub(crate) fn of(parameters: &'a [String], trainable: usize) -> Self {
        Self { parameters, trainable }
    }

    pub(crate) fn count(&self) -> String {
        let Self { parameters, trainable } = self;
        let count = parameters.len();
        format!("{count} of {trainable} trainable parameters got no gradient on any rank")
    }

    pub(crate) fn names(&self) -> String {
        let listed = &self.parameters[..self.parameters.len().min(Self::LISTED)];
        match self.parameters.len() - listed.len() {
            0 => listed.join(", "),
            more => format!("{} and {more} more", listed.join(", ")),
        }
    }
}

impl fmt::Display for Without<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.count(), self.names())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_of_parameters_is_cut_and_counted() {
        let parameters: Vec<_> = (0..102).map(|at| format!("p{at}")).collect();
        let text = |parameters| Without::of(parameters, 120).to_string();
        let head = "trainable parameters got no gradient on any rank: p0, p1";
        assert_eq!(text(&parameters[..2]), format!("2 of 120 {head}"));
        let text = text(&parameters);
        assert!(text.starts_with(&format!("102 of 120 {head}, ")), "{text}");
        assert!(text.ends_with(", p99 and 2 more"), "{text}");
    }
}
