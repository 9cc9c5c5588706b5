//! Collectives that have a gradient, and their reductions.

use std::fmt;

/// The largest number of elements, on one rank, of a differentiable product; a larger one is
/// refused. Its backward moves all elements twice and keeps the input, and a larger product is
/// seldom intended.
pub const MAX_PRODUCT: usize = 1 << 24;

/// A collective, or a conversion whose backward may be a collective.
///
/// Every member of a group applies the same collectives in the same order. Parts are of equal
/// length and in member order. Counts and lengths are in elements. `[n]` to `[m]` means an input of
/// `n` and an output of `m` elements on one member.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Collective {
    /// Every member gets the reduction of all members' elements. `[n]` to `[n]`.
    AllReduce {
        /// The operation that combines elements.
        reducer: Reducer,
        /// The meaning of the copies of the output.
        output: Copies,
    },
    /// Member `i` gets the reduction of all members' `i`-th parts. `[size * n]` to `[n]`.
    ReduceScatter {
        /// The operation that combines elements.
        reducer: Reducer,
    },
    /// Every member gets all members' elements, in member order. `[n]` to `[size * n]`.
    AllGather {
        /// The meaning of the copies of the output.
        output: Copies,
    },
    /// Every member gets the root's elements. `[n]` to `[n]`; the other members' inputs are not
    /// read, and their gradient is zero.
    Broadcast {
        /// The root's index in the group.
        root: usize,
        /// The meaning of the copies of the output.
        output: Copies,
    },
    /// The root gets the reduction of all members' elements. `[n]` to `[n]` at the root; the others
    /// have no output.
    Reduce {
        /// The root's index in the group.
        root: usize,
        /// The operation that combines elements.
        reducer: Reducer,
    },
    /// The root gets all members' elements, in member order. `[n]` to `[size * n]` at the root; the
    /// others have no output.
    Gather {
        /// The root's index in the group.
        root: usize,
    },
    /// Member `i` gets the root's `i`-th part. `[size * n]` to `[n]`; the other members' inputs
    /// have the same length, are not read, and their gradient is zero.
    Scatter {
        /// The root's index in the group.
        root: usize,
    },
    /// Member `i` gets from each member the part that this member has for it. `[sum of send]` to
    /// `[sum of receive]`.
    AllToAll {
        /// The number of elements that go to each member.
        send: Vec<usize>,
        /// The number of elements that come from each member.
        receive: Vec<usize>,
    },
    /// Each member sends its elements to at most one member. `[n]` to `[n]`; a member that receives
    /// none has zeros.
    Permute {
        /// The destination of each member's elements, or `None`. The same list on all members.
        destinations: Vec<Option<usize>>,
    },
    /// This member sends its elements to another one. `[n]`, without an output.
    Send {
        /// The receiver's index in the group.
        to: usize,
    },
    /// This member receives the elements of another one. `[n]`, which is not read, to `[n]`.
    Receive {
        /// The sender's index in the group.
        from: usize,
    },
    /// Member `i` gets the sum of the elements of the members 0 to `i`, itself included. `[n]` to
    /// `[n]`.
    Scan,
    /// Converts copies that count once into copies that each member uses in its own way. `[n]` to
    /// `[n]`, the same elements; the backward is an all_reduce.
    Share,
    /// Each member keeps its own part of the elements that all members hold. `[size * n]` to `[n]`;
    /// the backward of copies that are `Invariant` is an all_gather.
    Slice {
        /// The meaning of the copies of the input.
        input: Copies,
    },
    /// Each member's elements become its part of a whole whose other parts are zeros. `[n]` to
    /// `[size * n]`.
    Place,
    /// The first member keeps its elements, the others get zeros: copies become the terms of a sum.
    /// `[n]` to `[n]`.
    OnlyFirst,
}

/// The operation of a differentiable reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reducer {
    /// The sum of the elements.
    Sum,
    /// The sum, divided by the number of members.
    Avg,
    /// The product, of at most [`MAX_PRODUCT`] elements on a member.
    Product,
    /// The smallest element, NaN if one is NaN. The gradient goes to the members that hold it, in
    /// equal shares.
    Min,
    /// The largest element, NaN if one is NaN. The gradient goes to the members that hold it, in
    /// equal shares.
    Max,
    /// The sum, where each member first multiplies its elements by its own factor, which must be
    /// finite.
    PreMultiplied(f64),
}

/// The meaning of the copies that all members hold of the same elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copies {
    /// Each member uses its copy in its own way, so the cotangents of the copies add up.
    Replicate,
    /// All members use their copies in the same way, and the value counts once.
    Invariant,
}

impl Collective {
    /// The collective's name: that of the [`Op`](crate::Op) where there is one.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "all_reduce",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllGather { .. } => "all_gather",
            Self::Broadcast { .. } => "broadcast",
            Self::Reduce { .. } => "reduce",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::AllToAll { .. } => "all_to_all",
            Self::Permute { .. } => "permute",
            Self::Send { .. } => "send",
            Self::Receive { .. } => "recv",
            Self::Scan => "scan",
            Self::Share => "share",
            Self::Slice { .. } => "slice",
            Self::Place => "place",
            Self::OnlyFirst => "only_first",
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
