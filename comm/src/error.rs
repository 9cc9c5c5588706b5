//! The errors of this crate, with every number. `nccl` has those of NCCL.

#[cfg(feature = "nccl")]
pub(crate) mod nccl;

use std::convert::Infallible;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

#[cfg(feature = "nccl")]
pub use self::nccl::NcclError;
use crate::mismatch::Mismatch;
use crate::{Descriptor, Op};

/// An error of a collective, a group or a world.
///
/// [`is_fatal`](Self::is_fatal) distinguishes errors that end the world from aborted steps and from
/// mistakes of the caller. All ranks get the same value of `CollectiveMismatch`, `StepAborted`,
/// `WorldAborted` and `WorkFailed`. Between processes, the words may differ if the rank that
/// decides about the end of the world is silent.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Members of an operation issued different calls, or ranks wait for each other in different
    /// operations, so that none can go on. The world is aborted, and every rank gets this table.
    #[error("collective mismatch: {table}")]
    CollectiveMismatch {
        /// The call of each rank.
        table: Arc<Mismatch>,
    },
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
    /// The world has ended: a rank panicked, left, missed a deadline, or called
    /// [`World::abort`](crate::World::abort).
    #[error("world aborted: rank {rank}, step {step}, {}: {reason}", last(.operation.as_deref()))]
    WorldAborted {
        /// The rank at fault. After a missed deadline: a rank that is late and does not itself wait
        /// for another, or a rank whose gradient is still being read; the lowest if there are
        /// several.
        rank: Rank,
        /// The step that the rank was in.
        step: u64,
        /// The last operation that the rank issued, on any channel.
        operation: Option<Arc<Descriptor>>,
        /// The reason.
        reason: AbortReason,
    },
    /// The world has ended, and no rank is known to be at fault: the work of an operation panicked
    /// or did not end, and the cause is not the code that lends a member's gradients.
    #[error("world aborted in the work of {operation} ({}): {reason}", .operation.place())]
    WorkFailed {
        /// The operation.
        operation: Arc<Descriptor>,
        /// The reason.
        reason: AbortReason,
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
    /// The call does not suit its group: the length or the dtype of a buffer, a member or a layout
    /// that the group does not have, or members that share no memory. Nothing was issued. A value
    /// that [`World::broadcast`](crate::World::broadcast) cannot hand out is refused too.
    #[error("{op} on rank {rank}: {problem}")]
    Refused {
        /// The operation.
        op: Op,
        /// The calling rank.
        rank: Rank,
        /// The argument, and the problem with it.
        problem: String,
    },
    /// The code that lends a gradient to one operation issued another, or waited for it.
    #[error("{op} on rank {rank}: called from inside the work of another operation")]
    Reentrant {
        /// The operation.
        op: Op,
        /// The calling rank.
        rank: Rank,
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
    /// The world has no such rank.
    #[error("rank {rank} of a world of {size}: ranks are numbered from 0 to the size less 1")]
    BadRank {
        /// The rank, as given.
        rank: Rank,
        /// The size, as given.
        size: usize,
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
    /// A world in one process cannot have so many ranks.
    #[error("a world of {size} ranks: at most {most} may be threads of one process")]
    TooManyRanks {
        /// The number of ranks.
        size: usize,
        /// The most that a world in one process can have.
        most: usize,
    },
    /// A text does not describe a [`Fault`](crate::Fault), or a world cannot have the fault, and
    /// does not begin.
    #[error("fault `{fault}`: {problem}")]
    BadFault {
        /// The text.
        fault: String,
        /// The problem with it.
        problem: String,
    },
    /// This rank panicked, or could not be started.
    #[error(transparent)]
    RankFailed(#[from] RankFailure),
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
        matches!(
            self,
            Self::CollectiveMismatch { .. }
                | Self::WorldAborted { .. }
                | Self::WorkFailed { .. }
                | Self::BadFault { .. }
        )
    }
}

/// The reason why a world ended.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AbortReason {
    /// The rank panicked, or the code that lends its gradients, or the work of an operation.
    #[error("it panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: Arc<str>,
    },
    /// The rank returned, or dropped its world, while others waited for it.
    #[error("it left, but others wait for it in {awaited} ({})", .awaited.place())]
    Left {
        /// The operation that the others wait for.
        awaited: Arc<Descriptor>,
    },
    /// An operation did not end within the deadline.
    #[error("deadline of {deadline:?} missed in {awaited} ({}); {}", .awaited.place(), attendance(.arrived, .missing))]
    Deadline {
        /// The operation that was waited for.
        awaited: Arc<Descriptor>,
        /// The deadline.
        deadline: Duration,
        /// Members that had arrived.
        arrived: Vec<Rank>,
        /// Members that had not; none if the work itself took too long.
        missing: Vec<Rank>,
    },
    /// The rank called [`World::abort`](crate::World::abort), or its part of an operation failed.
    #[error("{reason}")]
    Requested {
        /// The reason that was given.
        reason: Arc<str>,
    },
    /// The rank's process ended without notice.
    #[error("its process is gone")]
    Gone,
    /// The rank can no longer exchange messages with the others.
    #[error("it cannot send or receive messages: {problem}")]
    Unreachable {
        /// The error of the transport.
        problem: Arc<str>,
    },
    /// The rank sent bytes that are not a message of this library, or a message that does not fit.
    #[error("it sent an invalid message: {problem}")]
    Garbled {
        /// The problem with the message.
        problem: Arc<str>,
    },
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

/// The last operation of a rank.
fn last(operation: Option<&Descriptor>) -> String {
    let none = || "before its first operation".to_owned();
    operation.map_or_else(none, |descriptor| format!("last in {descriptor}"))
}

/// The ranks without data, as seen by the rank that called.
fn without_data(rank: Rank, absent: &[Rank]) -> String {
    let numbers = numbers(absent);
    if absent.contains(&rank) {
        return format!("it has no data in this step (without data: ranks {numbers:?})");
    }
    format!("ranks {numbers:?} have no data in this step: only a barrier can run without them")
}

/// The ranks that came, and those that did not.
fn attendance(arrived: &[Rank], missing: &[Rank]) -> String {
    let arrived = numbers(arrived);
    let missing = numbers(missing);
    if missing.is_empty() {
        return format!("all of ranks {arrived:?} arrived, the work did not end");
    }
    format!("arrived: ranks {arrived:?}, missing: ranks {missing:?}")
}

fn numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.get()).collect()
}
