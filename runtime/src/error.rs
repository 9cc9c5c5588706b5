//! The errors of the runtime, each with the numbers that explain it. They import nothing else of
//! the runtime.

pub(crate) mod non_finite;

use std::borrow::Cow;
use std::fmt;

use hsdp_kernels::cuda::CudaError;
use hsdp_sharding::Rank;
use hsdp_sharding::step::Supply;

use crate::error::non_finite::NonFiniteGradient;

/// An error of the runtime.
///
/// After [`Error::Comm`] with `StepAborted` every rank can begin its next step; after `WorldAborted` no
/// further operation of this world succeeds. [`Error::is_fatal`] distinguishes the two cases.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The planner refuses the model or the mesh.
    #[error(transparent)]
    Plan(#[from] hsdp_sharding::Error),
    /// The kernels cannot compute with a dtype or a divisor, or cannot allocate memory.
    #[error(transparent)]
    Kernel(#[from] hsdp_kernels::Error),
    /// A collective failed, or the step or the world ended early.
    #[error(transparent)]
    Comm(#[from] hsdp_comm::Error),
    /// An option has a value that is not allowed.
    #[error("{what}")]
    Options {
        /// The option, its value, and the values that are allowed.
        what: String,
    },
    /// The runtime was called out of order.
    #[error("{operation} on rank {rank}, step {step}: {what}")]
    Misuse {
        /// The operation that was called.
        operation: &'static str,
        /// The rank.
        rank: Rank,
        /// The step.
        step: u64,
        /// The mistake, and the correct call.
        what: String,
    },
    /// The caller's values do not have the number of elements that the plan has.
    #[error("{operation} of {name} on rank {rank}: got {got} elements, the plan has {want}")]
    Size {
        /// The operation that was called.
        operation: &'static str,
        /// The name of the parameter.
        name: String,
        /// The rank.
        rank: Rank,
        /// The number of elements that the caller gave.
        got: usize,
        /// The number of elements in the plan.
        want: usize,
    },
    /// An argument of a differentiable collective does not fit the collective or its group. Nothing was issued.
    #[error("{operation} on rank {rank}: {what}")]
    Collective {
        /// The operation that was called.
        operation: &'static str,
        /// The rank.
        rank: Rank,
        /// The argument that does not fit, with its numbers.
        what: String,
    },
    /// An operation on distributed values does not allow the states that these values have.
    #[error("{operation} on rank {rank}: {problem}: {hint}")]
    State {
        /// The operation that was called.
        operation: &'static str,
        /// The rank.
        rank: Rank,
        /// The states, and the axis.
        problem: String,
        /// The operation to use instead.
        hint: &'static str,
    },
    /// A device has failed, or has not enough memory. The step fails on this rank, and the other ranks are told. A device that is late,
    /// or whose driver refuses a call, does not recover: the world ends.
    #[error("{operation} on rank {rank}, step {step}: {error}")]
    Device {
        /// The operation that was called.
        operation: &'static str,
        /// The rank.
        rank: Rank,
        /// The step.
        step: u64,
        /// The error of the device.
        error: CudaError,
    },
    /// The model cannot be placed on the device.
    #[error("the model cannot be placed on the device: {error}")]
    Placement {
        /// The error of the device.
        error: CudaError,
    },
    /// A buffer could not be allocated. The step fails on this rank, and the other ranks are told.
    #[error(
        "{operation} of unit {unit} on rank {rank}, step {step}: out of memory: cannot allocate {bytes} bytes"
    )]
    OutOfMemory {
        /// The operation that needs the buffer.
        operation: &'static str,
        /// The name of the unit.
        unit: String,
        /// The rank.
        rank: Rank,
        /// The step.
        step: u64,
        /// The size of the buffer.
        bytes: usize,
    },
    /// A handle belongs to a microbatch that is over, as in a backward through an old graph.
    #[error(
        "{operation} on rank {rank}: the handle belongs to {held}, and {current}; a graph can be used in its own microbatch only"
    )]
    StalePass {
        /// The operation that was called.
        operation: &'static str,
        /// The rank.
        rank: Rank,
        /// The microbatch and the step of the handle.
        held: String,
        /// The microbatch and the step in which the model is now.
        current: String,
    },
    /// A checkpoint could not be saved or loaded. All ranks get the same error; the model and earlier checkpoints are unchanged.
    #[error("{operation} at step {step}, on rank {rank}: {problem}")]
    Checkpoint {
        /// The operation that was called.
        operation: &'static str,
        /// The number of committed steps, or the step of the checkpoint that was loaded.
        step: u64,
        /// The first rank that failed.
        rank: Rank,
        /// The reason.
        problem: String,
    },
    /// Ranks entered a step, made a model, or updated it, with different values of something that must be the same on all ranks.
    #[error("{what} differs between ranks: rank {rank} has {got}, rank {other} has {want}")]
    Disagreement {
        /// The name of the value that differs.
        what: Cow<'static, str>,
        /// The first rank that differs.
        rank: Rank,
        /// The value of this rank.
        got: String,
        /// The rank with which it was compared.
        other: Rank,
        /// The value of that rank.
        want: String,
    },
    /// `Uneven::Error`: some ranks have data and others have none. Nothing was updated; the next step may begin.
    #[error("step {step}{}: ranks {} have no more data, ranks {} still have data: give every rank the same \
             number of batches, or choose Uneven::Stop or Uneven::ZeroWeight", InMicrobatch(*.microbatch), List(&.supply.exhausted), List(&.supply.ready))]
    UnevenInputs {
        /// The step.
        step: u64,
        /// The microbatch, where ranks have different numbers of microbatches in one step.
        microbatch: Option<usize>,
        /// The ranks that have data, and the ranks that have none.
        supply: Supply,
    },
    /// Two ranks named the same samples for a step, so some data would count twice and some not at all. Nothing was updated; the next
    /// step may begin.
    #[error(
        "step {step}: rank {rank} has the same samples as rank {other}: give every rank its own part of the data"
    )]
    SameSamples {
        /// The step.
        step: u64,
        /// The rank.
        rank: Rank,
        /// The first rank that has the same samples.
        other: Rank,
    },
    /// Some ranks end their run while others have data for another step. Nothing was updated.
    #[error("step {step}: ranks {} end their run after {committed} steps, ranks {} have data for another step: give every \
             rank the same number of batches, or choose Uneven::Stop or Uneven::ZeroWeight", List(.ending), List(.ready))]
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
    /// There is no next step, or no next microbatch in this step, because ranks have no more data. This is not a failure.
    /// Methods that return an `Option` or a [`NextStep`](crate::NextStep) report it without an error.
    #[error("step {step}{} does not begin: ranks {} have no more data", InMicrobatch(*.microbatch), List(&.supply.exhausted))]
    EndOfData {
        /// The step.
        step: u64,
        /// The microbatch that does not take place; `None` if the step does not.
        microbatch: Option<usize>,
        /// The ranks that have data, and the ranks that have none.
        supply: Supply,
    },
    /// All weights of the step are 0, so the gradient of the weighted mean has no divisor.
    #[error("step {step}: the weights of ranks {} add up to 0 over all microbatches", List(.ranks))]
    EmptyStep {
        /// The step.
        step: u64,
        /// All ranks of the world; each has weight 0.
        ranks: Vec<Rank>,
    },
    /// An evaluation has no items on any rank, so its mean has no divisor. Evaluations and steps may follow.
    #[error("evaluation before step {step}: the items of all ranks add up to 0")]
    EmptyEvaluation {
        /// The next step.
        step: u64,
    },
    /// The sum of the weights of a step exceeds a `u64`.
    #[error("step {step}: the weights of ranks {} add up to 2^64 or more; rank {heaviest} has the largest weight, {weight}", List(.ranks))]
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
    /// A gradient or the loss is not finite, and the model's options do not skip such steps. No parameter has changed.
    #[error("{0}")]
    NonFinite(NonFiniteGradient),
    /// Trainable parameters got no gradient on any rank in the first step. No parameter has changed. See
    /// [`Unused::ErrorInFirstStep`](crate::Unused::ErrorInFirstStep).
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
        /// Details of the causes, where the adapter of an autograd names them; otherwise empty. A rank
        /// without data in all steps so far has none.
        causes: String,
    },
    /// [`Unused::ErrorOnAnyRank`](crate::Unused::ErrorOnAnyRank): trainable parameters got no gradient
    /// on some ranks.
    #[error("step {step}: {}{causes}", Unused(.parameters))]
    UnusedParameters {
        /// The step.
        step: u64,
        /// The names of all such parameters, each with the ranks on which it got no gradient.
        parameters: Vec<(String, Vec<usize>)>,
        /// The usual causes, where the adapter of an autograd names them; otherwise empty.
        causes: String,
    },
}

/// A rank of [`launch`](crate::launch) that panicked, or could not be started.
impl From<hsdp_comm::RankFailure> for Error {
    fn from(failure: hsdp_comm::RankFailure) -> Self {
        Self::Comm(failure.into())
    }
}

impl Error {
    /// Whether no further operation of this world can succeed. The process should then end, or build a new world.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Comm(error) => error.is_fatal(),
            Self::Disagreement { .. } => true,
            Self::Device { error, .. } => {
                matches!(error, CudaError::Late { .. } | CudaError::Driver { .. })
            }
            _ => false,
        }
    }

    /// Returns the operation that was called, if the error names it.
    pub(crate) fn operation(&self) -> Option<&'static str> {
        match self {
            Self::Misuse { operation, .. }
            | Self::Size { operation, .. }
            | Self::Collective { operation, .. }
            | Self::State { operation, .. }
            | Self::Device { operation, .. }
            | Self::OutOfMemory { operation, .. }
            | Self::StalePass { operation, .. }
            | Self::Checkpoint { operation, .. } => Some(operation),
            _ => None,
        }
    }
}

struct InMicrobatch(Option<usize>);

impl fmt::Display for InMicrobatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(microbatch) => write!(f, ", microbatch {microbatch}"),
            None => Ok(()),
        }
    }
}

/// `parameter a got no gradient on ranks [0, 1]; parameter b got no gradient on ranks [1]`
struct Unused<'a>(&'a [(String, Vec<usize>)]);

impl fmt::Display for Unused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (name, ranks)) in self.0.iter().enumerate() {
            let separator = if place == 0 { "" } else { "; " };
            write!(f, "{separator}parameter {name} got no gradient on ranks {ranks:?}")?;
        }
        Ok(())
    }
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

/// `0, 3, 4`
struct List<'a>(&'a [Rank]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, rank) in self.0.iter().enumerate() {
            let separator = if place == 0 { "" } else { ", " };
            write!(f, "{separator}{rank}")?;
        }
        Ok(())
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

    #[test]
    fn a_device_that_does_not_recover_is_fatal_and_one_without_memory_is_not() {
        let error = |error| Error::Device { operation: "norm", rank: Rank::new(1), step: 7, error };
        let (operation, what, device) = ("a copy".to_owned(), "partials".to_owned(), 0);
        let late = CudaError::Late { operation: operation.clone(), device, waited_ms: 9 };
        let meaning = "the launch failed".to_owned();
        let driver = CudaError::Driver { operation, device, code: 719, meaning };
        let memory = CudaError::OutOfMemory { device, bytes: 8, what, free: 4, total: 4 };
        assert_eq!([late, driver, memory].map(|it| error(it).is_fatal()), [true, true, false]);
    }
}
