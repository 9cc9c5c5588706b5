//! What can go wrong, with every number.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::{DType, Rank};

use crate::{Descriptor, Mismatch, Op};

/// An error of a collective, a group or a world.
///
/// [`is_fatal`](Self::is_fatal) tells those that end the world from a step's end and from the caller's mistakes.
/// All ranks get the same value of the errors that are shared (`CollectiveMismatch`, `StepAborted`,
/// `WorldAborted`, `WorkFailed`).
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Members of an operation want different things, or ranks wait for each other in different operations, so that
    /// none can go on. The world is aborted: every rank gets this table.
    #[error("collective mismatch: {table}")]
    CollectiveMismatch {
        /// Who wanted what.
        table: Arc<Mismatch>,
    },
    /// A rank gave up its step. Discard this step and call [`World::next_epoch`](crate::World::next_epoch); the
    /// world goes on.
    #[error("step {step} aborted by rank {rank}: {reason}")]
    StepAborted {
        /// Who gave up first.
        rank: Rank,
        /// Its step.
        step: u64,
        /// Why.
        reason: Arc<str>,
    },
    /// The world is over: a rank panicked, left, missed a deadline, or asked for the end.
    #[error("world aborted: rank {rank}, step {step}, {}: {reason}", At(.operation.as_deref()))]
    WorldAborted {
        /// Whose doing it is. Of a missed deadline: a rank that came too late and does not wait for another itself, or
        /// whose gradient is still being read; the lowest if there are several.
        rank: Rank,
        /// The step it was in.
        step: u64,
        /// The operation it issued last, on any channel.
        operation: Option<Arc<Descriptor>>,
        /// What happened.
        reason: AbortReason,
    },
    /// The world is over, and no rank is known to be at fault: the work of an operation panicked or did not end, but
    /// not in the code that lends what a member brought.
    #[error("world aborted in the work of {operation} ({}): {reason}", .operation.place())]
    WorkFailed {
        /// The operation.
        operation: Arc<Descriptor>,
        /// What happened.
        reason: AbortReason,
    },
    /// A group was asked for that cannot be.
    #[error("group {ranks:?} on rank {rank} of {size}: {problem}")]
    BadGroup {
        /// Who asked.
        rank: Rank,
        /// Ranks in the world.
        size: usize,
        /// The members, as given.
        ranks: Vec<u32>,
        /// What is wrong with them.
        problem: &'static str,
    },
    /// A buffer has a length that the operation cannot use. Nothing was issued.
    #[error("{op} on rank {rank}: {what} has {found} elements, expected {expected}")]
    BadCount {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
        /// Which buffer.
        what: String,
        /// Its elements.
        found: usize,
        /// How many it should have, in words.
        expected: String,
    },
    /// A root, destination or source is no member of the group. Nothing was issued.
    #[error("{op} on rank {rank}: {what} is member {member}, but the group has {members} members")]
    BadMember {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
        /// Which argument.
        what: &'static str,
        /// Its value.
        member: usize,
        /// Members of the group.
        members: usize,
    },
    /// A unit is laid out over another number of ranks than the group has. Nothing was issued.
    #[error(
        "{op} on rank {rank}: the layout has {shards} shards, but the group has {members} members"
    )]
    BadLayout {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
        /// Shards of the layout.
        shards: usize,
        /// Members of the group.
        members: usize,
    },
    /// A dtype that the operation cannot use. Nothing was issued.
    #[error("{op} on rank {rank}: {dtype} elements: {problem}")]
    BadDType {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
        /// The dtype.
        dtype: DType,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A collective was issued, or waited for, by the code that lends a gradient to another one.
    #[error("{op} on rank {rank}: called from inside the work of another operation")]
    Reentrant {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
    },
    /// The memory that an operation needs is not to be had. Nothing was issued.
    #[error("{op} on rank {rank}, step {step}: out of memory: {bytes} bytes for {what}")]
    OutOfMemory {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
        /// The step it was in.
        step: u64,
        /// How much was asked for.
        bytes: usize,
        /// What for.
        what: String,
    },
    /// A device has refused, or has no memory. Those who were to read what it makes get the same.
    #[cfg(feature = "cuda")]
    #[error("{op} on rank {rank}, step {step}: {error}")]
    Device {
        /// What was called.
        op: Op,
        /// Whose part of it failed.
        rank: Rank,
        /// The step it was in.
        step: u64,
        /// What the device says.
        error: hsdp_kernels::cuda::CudaError,
    },
    /// NCCL has refused, or is not there.
    #[cfg(feature = "nccl")]
    #[error("{op} on rank {rank}, step {step}: {error}")]
    Nccl {
        /// What was called.
        op: Op,
        /// Whose part of it failed.
        rank: Rank,
        /// The step it was in.
        step: u64,
        /// What NCCL says.
        error: Arc<crate::nccl::NcclError>,
    },
    /// A rank could not connect by NCCL, or another one could not. All get this.
    #[cfg(feature = "nccl")]
    #[error("rank {rank} is not connected by NCCL: {error}")]
    Connect {
        /// The rank.
        rank: Rank,
        /// What NCCL says.
        error: Arc<crate::nccl::NcclError>,
    },
    /// A world cannot use NCCL so.
    #[cfg(feature = "nccl")]
    #[error("the world of rank {rank} cannot use NCCL: {problem}")]
    NotConnected {
        /// Who asked.
        rank: Rank,
        /// Why not.
        problem: &'static str,
    },
    /// A collective of users was called while members have no data, which only a barrier can do without. Nothing was
    /// issued. See [`World::set_absent`](crate::World::set_absent).
    #[error("{op} on rank {rank}: {}", WithoutData(.rank, .absent))]
    Absent {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
        /// The members that have no data.
        absent: Vec<Rank>,
    },
    /// A [`Fault`](crate::Fault) of a test stands in for the operation. Nothing was issued.
    #[error("{op} on rank {rank}, step {step}: {what}")]
    Injected {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
        /// The step it was in.
        step: u64,
        /// Which fault it is, and what the call was for.
        what: String,
    },
    /// A world was asked for that cannot be.
    #[error("rank {rank} of a world of {size}: ranks are numbered from 0 to the size less 1")]
    BadRank {
        /// The rank, as given.
        rank: Rank,
        /// The size, as given.
        size: usize,
    },
    /// Two threads claim to be the same rank. Only the second gets this; the first stays where it is.
    #[error("rank {rank} is claimed twice: by {first}, and by {second}, which is refused")]
    DuplicateRank {
        /// The rank.
        rank: Rank,
        /// Who had it first, as it names itself.
        first: Arc<str>,
        /// Who claimed it after that.
        second: Arc<str>,
    },
    /// Ranks that come together were told of worlds of different sizes.
    #[error("rank {rank} comes to a world of {size} ranks, and was told that it has {told}")]
    WorldSize {
        /// The rank that was told something else.
        rank: Rank,
        /// The size of the world.
        size: usize,
        /// The size that it was told.
        told: usize,
    },
    /// Ranks did not come within the deadline.
    #[error("after {deadline:?} ranks {missing:?} have not come; {arrived:?} have")]
    Incomplete {
        /// How long was waited.
        deadline: Duration,
        /// Who came.
        arrived: Vec<u32>,
        /// Who did not.
        missing: Vec<u32>,
    },
    /// Ranks that are to make a world differ in what they must have in common. All of them get this.
    #[error("ranks {} and {} differ in their {what}: {}, {}", .ranks[0], .ranks[1], .said[0], .said[1])]
    ConfigMismatch {
        /// In what.
        what: &'static str,
        /// The lowest two that differ.
        ranks: [Rank; 2],
        /// How each has it, and who it is.
        said: Box<[String; 2]>,
    },
    /// A call needs members that share memory, and these do not. Nothing was issued.
    #[error("{op} on rank {rank}: its members share no memory")]
    Apart {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
    },
    /// A collective was issued in a copy of the process (a fork), which has none of the world's other threads.
    #[error(
        "{op} on rank {rank}: the world was made in process {made_in}, this is its copy {called_in}"
    )]
    Forked {
        /// What was called.
        op: Op,
        /// By which rank.
        rank: Rank,
        /// The process whose world it is.
        made_in: u32,
        /// The process that called.
        called_in: u32,
    },
    /// A text is no fault.
    #[error("`{fault}` is no fault such as `rank 1, step 3, unit 2: panic`: {problem}")]
    BadFault {
        /// The text.
        fault: String,
        /// What it lacks.
        problem: String,
    },
    /// The environment asks for a world that this build cannot serve.
    #[error("{variable}={value}: {problem}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// Why it is refused.
        problem: String,
    },
}

/// What cannot fail has no error.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl Error {
    /// Whether the world is over: nothing but a new world helps.
    #[must_use]
    pub const fn is_fatal(&self) -> bool {
        matches!(
            self,
            Self::CollectiveMismatch { .. } | Self::WorldAborted { .. } | Self::WorkFailed { .. }
        )
    }
}

/// Why a world ended.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AbortReason {
    /// The rank panicked, or the code that lends what it brought, or the work of an operation.
    #[error("it panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: Arc<str>,
    },
    /// The rank returned, or dropped its world, while others waited for it.
    #[error("it left, but others wait for it in {awaited} ({})", .awaited.place())]
    Left {
        /// What the others wait for.
        awaited: Arc<Descriptor>,
    },
    /// An operation did not end within the deadline.
    #[error("deadline of {deadline:?} missed in {awaited} ({}); {}", .awaited.place(), Attendance(.arrived, .missing))]
    Deadline {
        /// What was waited for.
        awaited: Arc<Descriptor>,
        /// For how long.
        deadline: Duration,
        /// Members that had arrived.
        arrived: Vec<Rank>,
        /// Members that had not; none if the work itself took too long.
        missing: Vec<Rank>,
    },
    /// Its process ended, and said nothing.
    #[error("its process is gone")]
    Gone,
    /// It cannot be reached any more, or cannot reach others.
    #[error("its letters do not go or come: {problem}")]
    Unreachable {
        /// What the transport says.
        problem: Arc<str>,
    },
    /// It sent what is no letter of this library, or none that fits.
    #[error("it sent what cannot be: {problem}")]
    Garbled {
        /// What is wrong with it.
        problem: Arc<str>,
    },
    /// The rank asked for the end.
    #[error("{reason}")]
    Requested {
        /// Why.
        reason: Arc<str>,
    },
}

/// Why a step is given up: an argument of [`World::abort_step`](crate::World::abort_step).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepFailure {
    /// The step.
    pub step: u64,
    /// Why, for the other ranks to read.
    pub reason: String,
}

/// Where a rank was.
struct At<'a>(Option<&'a Descriptor>);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(descriptor) => write!(f, "last in {descriptor}"),
            None => f.write_str("before its first operation"),
        }
    }
}

/// Who has no data, as seen by the rank that called.
struct WithoutData<'a>(&'a Rank, &'a [Rank]);

impl fmt::Display for WithoutData<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(rank, absent) = self;
        let numbers: Vec<_> = absent.iter().map(|rank| rank.index()).collect();
        if absent.contains(rank) {
            return write!(f, "it has no data in this step (without data: ranks {numbers:?})");
        }
        write!(f, "ranks {numbers:?} have no data in this step: only a barrier does without them")
    }
}

/// Who came and who did not.
struct Attendance<'a>(&'a [Rank], &'a [Rank]);

impl fmt::Display for Attendance<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = |ranks: &[Rank]| ranks.iter().map(|rank| rank.index()).collect::<Vec<_>>();
        match self.1 {
            [] => write!(f, "all of ranks {:?} arrived, the work did not end", numbers(self.0)),
            missing => write!(
                f,
                "arrived: ranks {:?}, missing: ranks {:?}",
                numbers(self.0),
                numbers(missing)
            ),
        }
    }
}
