//! Errors of the data that ranks bring to a step or an evaluation.

use hsdp_sharding::Rank;
use hsdp_sharding::step::Supply;

/// Data of the ranks that does not make a step or an evaluation. The next step may begin with other
/// data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// `Uneven::Error`: some ranks have data and others have none. The next step may begin.
    #[error(
        "step {step}{}: ranks {} have no more data, ranks {} still have data: give every rank the \
         same number of batches, or choose Uneven::Stop or Uneven::ZeroWeight",
        in_microbatch(*.microbatch),
        listed(&.supply.exhausted),
        listed(&.supply.ready)
    )]
    UnevenInputs {
        /// The step.
        step: u64,
        /// The microbatch, where ranks have different numbers of microbatches in one step.
        microbatch: Option<usize>,
        /// The ranks that have data, and the ranks that have none.
        supply: Supply,
    },
    /// Two ranks named the same samples for a step, so some data would count twice and some not at
    /// all. The next step may begin.
    #[error(
        "step {step}: rank {rank} has the same samples as rank {other}: give every rank its own \
         part of the data"
    )]
    SameSamples {
        /// The step.
        step: u64,
        /// The rank.
        rank: Rank,
        /// The first rank that has the same samples.
        other: Rank,
    },
    /// Some ranks end their run while others have data for another step.
    #[error(
        "step {step}: ranks {} end their run after {committed} steps, ranks {} have data for \
         another step: give every rank the same number of batches, or choose Uneven::Stop or \
         Uneven::ZeroWeight",
        listed(.ending),
        listed(.ready)
    )]
    UnevenEnds {
        /// The step that the other ranks begin.
        step: u64,
        /// Steps that all ranks have committed.
        committed: u64,
        /// Ranks that end their run.
        ending: Vec<Rank>,
        /// Ranks that have data.
        ready: Vec<Rank>,
    },
    /// There is no next step, or no next microbatch in this step, because ranks have no more data.
    /// This is not a failure: after [`Step::microbatch`](crate::Step::microbatch) has returned it,
    /// [`Step::finish`](crate::Step::finish) ends the step with the microbatches before it.
    /// [`ShardedModel::next_step`](crate::ShardedModel::next_step) reports it as a
    /// [`NextStep`](crate::NextStep), without an error.
    #[error(
        "step {step}{} does not begin: ranks {} have no more data",
        in_microbatch(*.microbatch),
        listed(&.supply.exhausted)
    )]
    EndOfData {
        /// The step.
        step: u64,
        /// The microbatch that does not take place; `None` if the step does not.
        microbatch: Option<usize>,
        /// The ranks that have data, and the ranks that have none.
        supply: Supply,
    },
    /// All weights of the step are 0, so the gradient of the weighted mean has no divisor.
    #[error("step {step}: the weights of ranks {} add up to 0 over all microbatches", listed(.ranks))]
    EmptyStep {
        /// The step.
        step: u64,
        /// All ranks of the world; each has weight 0.
        ranks: Vec<Rank>,
    },
    /// An evaluation has no items on any rank, so its mean has no divisor. Evaluations and steps
    /// may follow.
    #[error("evaluation before step {step}: the items of all ranks add up to 0")]
    EmptyEvaluation {
        /// The next step.
        step: u64,
    },
    /// The sum of the weights of a step exceeds a `u64`.
    #[error(
        "step {step}: the weights of ranks {} add up to 2^64 or more; rank {heaviest} has the \
         largest weight, {weight}",
        listed(.ranks)
    )]
    WeightOverflow {
        /// The step.
        step: u64,
        /// The shortest prefix of the ranks whose weights exceed a `u64` together.
        ranks: Vec<Rank>,
        /// The rank with the largest weight.
        heaviest: Rank,
        /// The weight of that rank.
        weight: u64,
    },
}

fn in_microbatch(microbatch: Option<usize>) -> String {
    microbatch.map_or_else(String::new, |microbatch| format!(", microbatch {microbatch}"))
}

fn listed(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}
