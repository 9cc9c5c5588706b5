//! What can go wrong in a step, each with the numbers that say why.

use std::fmt;

use hsdp_sharding::Rank;

use crate::non_finite::NonFiniteGradient;
use crate::uneven::Supply;

/// An error of the runtime.
///
/// After [`Error::Comm`] with `StepAborted` every rank begins its next step clean; after
/// `WorldAborted` nothing more can be done with this world. [`Error::is_fatal`] tells them apart.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model or the mesh cannot be planned.
    #[error(transparent)]
    Plan(#[from] hsdp_sharding::Error),
    /// A dtype or a divisor that the kernels cannot compute with.
    #[error(transparent)]
    Kernel(#[from] hsdp_kernels::Error),
    /// A collective failed, or the step or the world ended early.
    #[error(transparent)]
    Comm(#[from] hsdp_comm::Error),
    /// An option has a value that makes no sense.
    #[error("{what}")]
    Options {
        /// The option, its value, and what it may be.
        what: String,
    },
    /// The runtime was called out of order.
    #[error("{operation} on rank {rank}, step {step}: {what}")]
    Misuse {
        /// What was called.
        operation: &'static str,
        /// By which rank.
        rank: Rank,
        /// In which step.
        step: u64,
        /// What is wrong with it, and what to do instead.
        what: String,
    },
    /// Values handed in do not have the size or dtype that the plan gives them.
    #[error("{operation} of {name} on rank {rank}: got {got} elements, the plan has {want}")]
    Size {
        /// What was called.
        operation: &'static str,
        /// Of which parameter or unit.
        name: String,
        /// By which rank.
        rank: Rank,
        /// Elements handed in.
        got: usize,
        /// Elements planned.
        want: usize,
    },
    /// A differentiable collective was called with something that does not fit it. Nothing was issued.
    #[error("{operation} on rank {rank}: {what}")]
    Collective {
        /// What was called.
        operation: &'static str,
        /// By which rank.
        rank: Rank,
        /// What does not fit, with its numbers.
        what: String,
    },
    /// Values in these states cannot be used so.
    #[error("{operation} on rank {rank}: {problem}: {hint}")]
    State {
        /// What was called.
        operation: &'static str,
        /// By which rank.
        rank: Rank,
        /// Which states they are, and along which axis.
        problem: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// A device has refused, or has no memory. The step fails on this rank, and the others are told.
    #[cfg(feature = "cuda")]
    #[error("{operation} on rank {rank}, step {step}: {error}")]
    Device {
        /// What was called.
        operation: &'static str,
        /// By which rank.
        rank: Rank,
        /// In which step.
        step: u64,
        /// What the device says.
        error: hsdp_kernels::cuda::CudaError,
    },
    /// A model cannot be placed on a device.
    #[cfg(feature = "cuda")]
    #[error("a model cannot be placed there: {error}")]
    Placement {
        /// What the device says.
        error: hsdp_kernels::cuda::CudaError,
    },
    /// There is no memory for a buffer. The step fails on this rank, and the others are told.
    #[error(
        "{operation} of unit {unit} on rank {rank}, step {step}: out of memory: no {bytes} bytes to be had"
    )]
    OutOfMemory {
        /// What the buffer is for.
        operation: &'static str,
        /// Of which unit.
        unit: String,
        /// On which rank.
        rank: Rank,
        /// In which step.
        step: u64,
        /// How many bytes were asked for.
        bytes: usize,
    },
    /// Something belongs to a microbatch that is over: a backward through an old graph, say.
    #[error(
        "{operation} on rank {rank}: this belongs to {held}, and {current}; a graph can be used in its own microbatch only"
    )]
    StalePass {
        /// What was called.
        operation: &'static str,
        /// By which rank.
        rank: Rank,
        /// Step and microbatch that the caller holds.
        held: String,
        /// What the model is doing now.
        current: String,
    },
    /// A checkpoint could not be saved or loaded. All ranks are told the same; the model and what was saved before are as they were.
    #[error("{operation} at step {step}, on rank {rank}: {problem}")]
    Checkpoint {
        /// What was called.
        operation: &'static str,
        /// Steps that an optimizer had gone through.
        step: u64,
        /// The first rank that failed.
        rank: Rank,
        /// Why.
        problem: String,
    },
    /// Ranks entered a step, or made a model, with different ideas of it.
    #[error("{what} differs between ranks: rank {rank} has {got}, rank {other} has {want}")]
    Disagreement {
        /// What differs.
        what: &'static str,
        /// The first rank that differs.
        rank: Rank,
        /// What it has.
        got: String,
        /// The rank that it was compared with.
        other: Rank,
        /// What that one has.
        want: String,
    },
    /// `Uneven::Error`: some ranks have data and others have none. Nothing was updated; a next step may begin.
    #[error("step {step}{}: ranks {} have no more data, ranks {} have: give every rank as many batches, or choose \
             Uneven::Stop or Uneven::ZeroWeight", InMicrobatch(*.microbatch), List(&.supply.exhausted), List(&.supply.ready))]
    UnevenInputs {
        /// The step.
        step: u64,
        /// The microbatch, where ranks brought different numbers of them to a step.
        microbatch: Option<usize>,
        /// Who has data and who has not.
        supply: Supply,
    },
    /// Two ranks named the same samples for a step, so some data would count twice and some not at all. Nothing was updated; a next step may begin.
    #[error(
        "step {step}: rank {rank} has the same samples as rank {other}: give every rank its own part of the data"
    )]
    SameSamples {
        /// The step.
        step: u64,
        /// The rank.
        rank: Rank,
        /// The first that has the same.
        other: Rank,
    },
    /// Some ranks end their run where others have data for another step. Nothing was updated.
    #[error("step {step}: ranks {} end their run after {committed} steps, ranks {} have data for another: give every \
             rank as many batches, or choose Uneven::Stop or Uneven::ZeroWeight", List(.ending), List(.ready))]
    UnevenEnds {
        /// The step that others wanted to make.
        step: u64,
        /// Steps that all ranks have committed.
        committed: u64,
        /// Ranks that end their run.
        ending: Vec<Rank>,
        /// Ranks that have data.
        ready: Vec<Rank>,
    },
    /// There is no next step (or no next microbatch in this one), since ranks have no more data; not a failure. What
    /// asks with an `Option` or [`NextStep`](crate::NextStep) gets no error.
    #[error("step {step}{}: ranks {} have no more data, so it ends here", InMicrobatch(*.microbatch), List(&.supply.exhausted))]
    EndOfData {
        /// The step.
        step: u64,
        /// The microbatch that does not take place, where it is not the whole step.
        microbatch: Option<usize>,
        /// Who has data and who has not.
        supply: Supply,
    },
    /// All weights of the step were 0: there is nothing to divide by.
    #[error("step {step}: the weights of ranks {} add up to 0 over all microbatches", List(.ranks))]
    EmptyStep {
        /// The step.
        step: u64,
        /// The ranks, each of weight 0: all that there are.
        ranks: Vec<Rank>,
    },
    /// The weights of a step have no exact sum.
    #[error("step {step}: the weights of ranks {} add up to 2^64 or more; the heaviest, rank {heaviest}, has {weight}", List(.ranks))]
    WeightOverflow {
        /// The step.
        step: u64,
        /// The first ranks whose weights together are too much.
        ranks: Vec<Rank>,
        /// The heaviest of all ranks.
        heaviest: Rank,
        /// What it has.
        weight: u64,
    },
    /// A gradient is not finite, and the model was not told to skip such steps. No parameter has changed.
    #[error("{0}")]
    NonFinite(NonFiniteGradient),
    /// `Unused::Error`: a trainable parameter got no gradient on some ranks.
    #[error("step {step}: parameter {parameter} got no gradient on ranks {ranks:?}")]
    UnusedParameter {
        /// The step.
        step: u64,
        /// The first such parameter.
        parameter: String,
        /// The ranks on which it got none.
        ranks: Vec<usize>,
    },
}

impl Error {
    /// Whether this world is of no more use: the process should end, or build a new one.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Comm(error) => error.is_fatal(),
            Self::Disagreement { .. } => true,
            _ => false,
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
