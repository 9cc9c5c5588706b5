//! The errors of this crate, with every number.

mod call;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
mod setup;
mod world;

use std::convert::Infallible;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

pub use self::call::CallError;
#[cfg(feature = "nccl")]
pub use self::nccl::NcclError;
pub use self::setup::SetupError;
pub use self::world::{AbortReason, WorldError};
use crate::Op;

/// An error of a collective, a group or a world.
///
/// After [`World`](Self::World) no call of this world succeeds, and after
/// [`StepAborted`](Self::StepAborted) the next step can begin. All ranks get the same value of
/// these two, but for [`WorldError::BadFault`]. Between processes, the words may differ if the rank
/// that decides about the end of the world is silent.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The world has ended: only a new world can go on.
    #[error(transparent)]
    World(#[from] WorldError),
    /// A rank aborted its step. Discard this step and call
    /// [`World::next_epoch`](crate::World::next_epoch); the world goes on.
    #[error("step {step} aborted by rank {rank}: {reason}")]
    StepAborted {
        /// The rank that aborted first.
        rank: Rank,
        /// Its step.
        step: u64,
        /// The reason that it gave.
        reason: Arc<str>,
        /// The mistake that the rank made between steps, if that is the reason.
        mistake: Option<Mistake>,
    },
    /// The call is refused. The world goes on.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A device refused a call, or ran out of memory. The ranks that depend on its output get the
    /// same error.
    #[error("{op} on rank {rank}, step {step}: {error}")]
    Device {
        /// The operation.
        op: Op,
        /// The rank whose part failed.
        rank: Rank,
        /// The step that the rank was in.
        step: u64,
        /// The error of the device.
        error: hsdp_kernels::cuda::CudaError,
    },
    /// NCCL refused a call, or is not installed.
    #[cfg(feature = "nccl")]
    #[error("{op} on rank {rank}, step {step}: {error}")]
    Nccl {
        /// The operation.
        op: Op,
        /// The rank whose part failed.
        rank: Rank,
        /// The step that the rank was in.
        step: u64,
        /// The error of NCCL.
        error: Arc<NcclError>,
    },
    /// The world could not be made, or connected by NCCL.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// This rank panicked, or could not be started.
    #[error(transparent)]
    RankFailed(#[from] RankFailure),
}

/// A rank of [`launch`](crate::launch) whose closure did not return.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}: {message}")]
pub struct RankFailure {
    /// The rank.
    pub rank: Rank,
    /// The message of its panic, or the reason why it could not be started.
    pub message: Arc<str>,
}

/// A conversion that cannot fail has no error.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl Error {
    /// Whether the world has ended: only a new world can go on.
    #[must_use]
    pub const fn is_fatal(&self) -> bool {
        matches!(self, Self::World(_))
    }
}

/// The reason why a step is aborted: an argument of
/// [`World::abort_step`](crate::World::abort_step).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepFailure {
    /// The step.
    pub step: u64,
    /// The reason, for the other ranks to read.
    pub reason: String,
}

/// The identity of a mistake between steps: equal on ranks that make the same mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mistake(u64);

impl Mistake {
    /// For hsdp: returns the identity of the mistake with this key: the call, the kind of its
    /// error, its step. The hash of the key must be the same on all ranks.
    #[doc(hidden)]
    #[must_use]
    pub fn of(key: &impl Hash) -> Self {
        let mut hasher = Xxh3::new();
        key.hash(&mut hasher);
        Self(hasher.finish())
    }
}

fn numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.get()).collect()
}
