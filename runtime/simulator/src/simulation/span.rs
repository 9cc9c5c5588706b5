//! The activity of a rank from one time to another.

use crate::Time;
use crate::host::{Operation, Work};

/// The resource that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// The rank's thread, which computes where the model is in host memory.
    Host,
    /// The stream of computation of a device.
    Computation,
    /// A stream of collectives, by number.
    Collectives(usize),
}

/// A use of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Computation.
    Work(Work),
    /// The launch of computation on a device.
    Launch(Work),
    /// An operation, from the time at which all members are ready.
    Operation(Operation),
    /// The thread's part of an operation: the call, and in host memory its part of the work.
    Issue(Operation),
    /// Waiting for an operation.
    Wait(Operation),
}

/// The activity of the ranks of a color from one time to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The color.
    pub color: usize,
    /// The resource.
    pub lane: Lane,
    /// Its use.
    pub what: What,
    /// The microbatch, from 0.
    pub microbatch: u64,
    /// From this time on.
    pub begins: Time,
    /// Until this time.
    pub ends: Time,
    /// Waiting for members that are late. Of an operation: the time before it, since this color was ready. Of a wait: the part of it.
    pub late: Time,
}

impl Span {
    /// Whether it takes time, or is one of those that are there even if they take none.
    pub(super) fn is_shown(&self) -> bool {
        matches!(self.what, What::Work(_) | What::Operation(_)) || self.begins < self.ends
    }
}
