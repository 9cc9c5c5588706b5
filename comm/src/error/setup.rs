//! Errors of the making of a world, and of its connection by NCCL.

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

#[cfg(feature = "nccl")]
use super::NcclError;

/// A world that could not be made, or connected by NCCL, or ranks that differ in a setting.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The world has more ranks than one process can have threads of.
    #[error("a world of {size} ranks: at most {most} may be threads of one process")]
    TooManyRanks {
        /// The number of ranks.
        size: usize,
        /// The most that a world in one process can have.
        most: usize,
    },
    /// Ranks that join one world were told different sizes.
    #[error("rank {rank} joins a world of {size} ranks, but was told that it has {told}")]
    WorldSize {
        /// The rank that was told another size.
        rank: Rank,
        /// The size of the world.
        size: usize,
        /// The size that it was told.
        told: usize,
    },
    /// Two threads claim to be the same rank. Only the second gets this error; the first keeps the
    /// rank.
    #[error("rank {rank} is claimed twice: by {first}, and by {second}, which is refused")]
    DuplicateRank {
        /// The rank.
        rank: Rank,
        /// The name of the thread that claimed it first.
        first: Arc<str>,
        /// The name of the thread that claimed it after that.
        second: Arc<str>,
    },
    /// Ranks did not join within the deadline.
    #[error("after {deadline:?} ranks {missing:?} have not joined; ranks {arrived:?} have")]
    Incomplete {
        /// The deadline.
        deadline: Duration,
        /// The ranks that joined.
        arrived: Vec<u32>,
        /// The ranks that did not.
        missing: Vec<u32>,
    },
    /// Ranks of one world differ in a setting that they must share. All of them get this error.
    #[error("ranks {} and {} differ in their {what}: {}, {}", .ranks[0], .ranks[1], .said[0], .said[1])]
    ConfigMismatch {
        /// The setting.
        what: &'static str,
        /// The lowest two ranks that differ.
        ranks: [Rank; 2],
        /// The value on each of the two; where ranks are processes, with the process and its host.
        said: Box<[String; 2]>,
    },
    /// The environment contradicts itself, or asks for a world that this build cannot make.
    #[error("{variable}={value}: {problem}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The reason for the refusal.
        problem: String,
    },
    /// This rank or another one could not connect by NCCL. All ranks get this error.
    #[cfg(feature = "nccl")]
    #[error("rank {rank} is not connected by NCCL: {error}")]
    Connect {
        /// The rank.
        rank: Rank,
        /// The error of NCCL.
        error: Arc<NcclError>,
    },
    /// This world cannot use NCCL, or is not connected yet.
    #[cfg(feature = "nccl")]
    #[error("the world of rank {rank} cannot use NCCL: {problem}")]
    NotConnected {
        /// The calling rank.
        rank: Rank,
        /// The reason.
        problem: &'static str,
    },
}
