//! The costs of actions on a machine.

use hsdp_sharding::Rank;

use crate::Time;
use crate::host::{Members, Operation, Work};

/// A level of links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Within a machine.
    Machine,
    /// Between machines.
    Network,
}

/// The cost of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCost {
    /// Of a member's host: the call, and on a host the member's part of the work.
    pub host: Time,
    /// From the moment at which all members are ready to the end.
    pub link: Time,
    /// The time for which a member's links carry its bytes, by level.
    pub busy: [Time; 2],
}

/// The cost of computation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCost {
    /// Of the host: the launches; where the model is in host memory, all.
    pub host: Time,
    /// Of the device.
    pub device: Time,
}

/// The costs of actions on a machine.
pub trait Costs {
    /// A number that is the same for groups on which each operation has the same costs. `first` is the first member of the group.
    fn shape(&self, members: Members, first: Rank) -> usize;

    /// The cost of an operation of a group of this shape.
    fn operation(&self, operation: &Operation, shape: usize) -> OperationCost;

    /// The cost of computation on a rank.
    fn work(&self, work: Work) -> WorkCost;
}
