//! The operations, the reductions and the channels, by name.

use std::fmt;

use hsdp_kernels::ReduceOp;

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Op {
    /// Every member gets the elements of all members, in member order.
    AllGather,
    /// Member `i` gets the reduction of the `i`-th parts of all members.
    ReduceScatter,
    /// Every member gets the reduction of the elements of all members.
    AllReduce,
    /// Every member gets the root's elements.
    Broadcast,
    /// The root gets the reduction of the elements of all members.
    Reduce,
    /// The root gets the elements of all members, in member order.
    Gather,
    /// Member `i` gets the root's `i`-th part.
    Scatter,
    /// Member `i` gets the part that each member cut for it.
    AllToAll,
    /// Each member sends its elements to at most one member.
    Permute,
    /// The sending half of a transfer between two members.
    Send,
    /// The receiving half of a transfer between two members.
    Recv,
    /// Completes when every member has issued it.
    Barrier,
}

impl Op {
    /// Every operation.
    pub const ALL: [Self; 12] = [
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Permute,
        Self::Send,
        Self::Recv,
        Self::Barrier,
    ];

    /// Its name: `all_gather`, `reduce_scatter`, ...
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Permute => "permute",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Barrier => "barrier",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How a reducing operation combines the members' elements, always in member order.
///
/// f16 and bf16 are combined in f32 and rounded once; integers wrap around.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The sum, divided by the number of members. Floating-point dtypes only.
    Avg,
    /// The product.
    Product,
    /// The smallest; NaN if one is NaN.
    Min,
    /// The largest; NaN if one is NaN.
    Max,
}

impl Reduction {
    /// Every reduction.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Avg, Self::Product, Self::Min, Self::Max];

    /// Its name: `sum`, `avg`, `product`, `min`, `max`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
        }
    }

    /// The arithmetic that combines elements; an average is a sum that is divided afterwards.
    pub(crate) const fn fold(self) -> ReduceOp {
        match self {
            Self::Sum | Self::Avg => ReduceOp::Sum,
            Self::Product => ReduceOp::Product,
            Self::Min => ReduceOp::Min,
            Self::Max => ReduceOp::Max,
        }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An independent sequence of operations: operations of different channels never meet.
///
/// Gathers and reductions are two channels, so neither queues behind the other. Operations of users can never meet
/// operations of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Channel {
    /// Gathers of parameters.
    Gather,
    /// Reductions of gradients over the shard group.
    Reduce,
    /// Reductions of partials over the replicate group.
    AllReduce,
    /// Headers, agreements, exports.
    Control,
    /// Operations that the embedding program issues itself.
    User,
}

impl Channel {
    /// Every channel.
    pub const ALL: [Self; 5] =
        [Self::Gather, Self::Reduce, Self::AllReduce, Self::Control, Self::User];

    /// Its name: `gather`, `control`, ...
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::AllReduce => "all_reduce",
            Self::Control => "control",
            Self::User => "user",
        }
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
