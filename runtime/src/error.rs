//! The errors of the runtime, each with the numbers that explain it. They import nothing else of
//! the runtime.

pub(crate) mod data;
pub(crate) mod gradients;

use std::borrow::Cow;

use hsdp_kernels::cuda::CudaError;
use hsdp_sharding::Rank;

pub use crate::error::data::DataError;
pub use crate::error::gradients::GradientError;
pub(crate) use crate::error::gradients::Without;

/// An error of the runtime.
///
/// After [`Error::Comm`] with [`StepAborted`](hsdp_comm::Error::StepAborted) every rank can begin
/// its next step; after [`World`](hsdp_comm::Error::World) no further operation of this world
/// succeeds. [`Error::is_fatal`] distinguishes the two cases.
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
    /// An argument of a differentiable collective does not fit the collective or its group, or the
    /// states of distributed values do not allow the operation. Nothing was issued.
    #[error("{operation} on rank {rank}: {what}")]
    Collective {
        /// The operation that was called.
        operation: &'static str,
        /// The rank.
        rank: Rank,
        /// The argument that does not fit, with its numbers; or the states and the axis, with the
        /// operation to use instead.
        what: String,
    },
    /// A device has failed, or has not enough memory. The step fails on this rank, and the other
    /// ranks are told. A device that is late, or whose driver refuses a call, does not recover: the
    /// world ends.
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
    /// A checkpoint could not be saved or loaded. All ranks get the same error; the model and
    /// earlier checkpoints are unchanged.
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
    /// Ranks entered a step, made a model, updated it, or ended an evaluation, with different
    /// values of something that must be the same on all ranks.
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
    /// The data of the ranks does not make a step or an evaluation: give other data, or end the
    /// run. Nothing was updated.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The gradients are not those of a step: change the model, skip the step, or freeze
    /// parameters. No parameter has changed.
    #[error(transparent)]
    Gradients(#[from] GradientError),
}

/// A rank of [`launch`](crate::launch) that panicked, or could not be started.
impl From<hsdp_comm::RankFailure> for Error {
    fn from(failure: hsdp_comm::RankFailure) -> Self {
        Self::Comm(failure.into())
    }
}

impl Error {
    /// Whether no further operation of this world can succeed. The process should then end, or
    /// build a new world.
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
            | Self::Device { operation, .. }
            | Self::OutOfMemory { operation, .. }
            | Self::StalePass { operation, .. }
            | Self::Checkpoint { operation, .. } => Some(operation),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_recover_is_fatal_and_one_without_memory_is_not() {
        let error = |error| Error::Device { operation: "norm", rank: Rank::new(1), step: 7, error };
        let operation = "a copy".to_owned();
        let what = "partials".to_owned();
        let device = 0;
        let late = CudaError::Late { operation: operation.clone(), device, waited_ms: 9 };
        let meaning = "the launch failed".to_owned();
        let driver = CudaError::Driver { operation, device, code: 719, meaning };
        let memory = CudaError::OutOfMemory { device, bytes: 8, what, free: 4, total: 4 };
        assert_eq!([late, driver, memory].map(|it| error(it).is_fatal()), [true, true, false]);
    }
}
