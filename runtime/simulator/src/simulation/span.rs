//! What a rank does from one time to another.

use crate::Time;
use crate::order::{Operation, Work};

/// The resource that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// The rank's thread.
    Host,
    /// The stream of computation of a device.
    Computation,
    /// A stream of collectives, by number.
    Collectives(usize),
}

/// What uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Computation.
    Work(Work),
    /// An operation.
    Operation(Operation),
}

/// What the ranks of a color do from one time to another.
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
}
