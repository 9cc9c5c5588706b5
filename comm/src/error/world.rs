//! The ends of a world.

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use super::numbers;
use crate::Descriptor;
use crate::mismatch::Mismatch;

/// The end of a world, or a fault with which none begins: only a new world can go on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// Members of an operation issued different calls, or ranks wait for each other in different
    /// operations, so that none can go on. The world is aborted, and every rank gets this table.
    #[error("collective mismatch: {0}")]
    Mismatch(Arc<Mismatch>),
    /// A rank panicked, left, missed a deadline, or called
    /// [`World::abort`](crate::World::abort).
    #[error("world aborted: rank {rank}, step {step}, {}: {reason}", last(.operation.as_deref()))]
    Aborted {
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
    /// The work of an operation panicked or did not end, and no rank is known to be at fault: the
    /// cause is not the code that lends a member's gradients.
    #[error("world aborted in the work of {operation} ({}): {reason}", .operation.place())]
    WorkFailed {
        /// The operation.
        operation: Arc<Descriptor>,
        /// The reason.
        reason: AbortReason,
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
        arrived: Arc<[Rank]>,
        /// Members that had not; none if the work itself took too long.
        missing: Arc<[Rank]>,
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

/// Returns a text about the last operation of a rank.
fn last(operation: Option<&Descriptor>) -> String {
    let none = || "before its first operation".to_owned();
    operation.map_or_else(none, |descriptor| format!("last in {descriptor}"))
}

/// Returns a text about the ranks that arrived, and the ranks that did not.
fn attendance(arrived: &[Rank], missing: &[Rank]) -> String {
    let arrived = numbers(arrived);
    let missing = numbers(missing);
    if missing.is_empty() {
        return format!("all of ranks {arrived:?} arrived, the work did not end");
    }
    format!("arrived: ranks {arrived:?}, missing: ranks {missing:?}")
}
