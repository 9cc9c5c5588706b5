//! Calls that are refused.

use std::time::Duration;

use hsdp_sharding::Rank;

use super::numbers;
use crate::Op;

/// A call that is refused. The world goes on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The call does not suit its group: the length or the dtype of a buffer, a member or a layout
    /// that the group does not have, or members that share no memory. Nothing was issued. A value
    /// that [`World::broadcast`](crate::World::broadcast) cannot hand out is refused too, on all
    /// ranks.
    #[error("{op} on rank {rank}: {problem}")]
    Refused {
        /// The operation.
        op: Op,
        /// The calling rank.
        rank: Rank,
        /// The argument, and the problem with it.
        problem: String,
    },
    /// The list of ranks is not a valid group.
    #[error("group {ranks:?} on rank {rank} of {size}: {problem}")]
    BadGroup {
        /// The calling rank.
        rank: Rank,
        /// Ranks in the world.
        size: usize,
        /// The members, as given.
        ranks: Vec<u32>,
        /// The problem with the list.
        problem: &'static str,
    },
    /// A world that runs, or one that a caller wants to make, has no such rank.
    #[error("rank {rank} of a world of {size}: ranks are numbered from 0 to the size less 1")]
    BadRank {
        /// The rank, as given.
        rank: Rank,
        /// The size, as given.
        size: usize,
    },
    /// The code that lends a gradient to one operation issued another, or waited for it.
    #[error("{op} on rank {rank}: called from inside the work of another operation")]
    Reentrant {
        /// The operation.
        op: Op,
        /// The calling rank.
        rank: Rank,
    },
    /// A collective was called on [`Channel::User`](crate::Channel::User) while members have no
    /// data. Only a barrier can run without them. Nothing was issued. See
    /// [`World::set_absent`](crate::World::set_absent).
    #[error("{op} on rank {rank}: {}", without_data(*.rank, .absent))]
    Absent {
        /// The operation.
        op: Op,
        /// The calling rank.
        rank: Rank,
        /// The members that have no data.
        absent: Vec<Rank>,
    },
    /// Memory for an operation could not be allocated. Nothing was issued.
    #[error("{op} on rank {rank}, step {step}: out of memory: {bytes} bytes for {what}")]
    OutOfMemory {
        /// The operation.
        op: Op,
        /// The calling rank.
        rank: Rank,
        /// The step that the rank was in.
        step: u64,
        /// The bytes that were asked for.
        bytes: usize,
        /// The purpose of the memory.
        what: String,
    },
    /// A thread still uses a buffer that was lent to an operation which has failed.
    #[error("{op} on rank {rank}, step {step}: its buffer is still in use after {waited:?}")]
    StillLent {
        /// The operation.
        op: Op,
        /// The rank that has lent the buffer.
        rank: Rank,
        /// The step that the rank was in.
        step: u64,
        /// The time for which the rank has waited.
        waited: Duration,
    },
    /// A [`Fault`](crate::Fault) of a test replaced the operation. Nothing was issued.
    #[error("{op} on rank {rank}, step {step}: {what}")]
    Injected {
        /// The operation.
        op: Op,
        /// The calling rank.
        rank: Rank,
        /// The step that the rank was in.
        step: u64,
        /// The fault, and the tag of the call.
        what: String,
    },
    /// A collective was issued in a copy of the process (a fork), which lacks the world's other
    /// threads.
    #[error(
        "{op} on rank {rank}: the world was made in process {made_in}, this is its copy {called_in}"
    )]
    Forked {
        /// The operation.
        op: Op,
        /// The calling rank.
        rank: Rank,
        /// The process that made the world.
        made_in: u32,
        /// The process that called.
        called_in: u32,
    },
}

/// Returns a text about the ranks without data, as seen by the rank that called.
fn without_data(rank: Rank, absent: &[Rank]) -> String {
    let numbers = numbers(absent);
    if absent.contains(&rank) {
        return format!("it has no data in this step (without data: ranks {numbers:?})");
    }
    format!("ranks {numbers:?} have no data in this step: only a barrier can run without them")
}
