//! Collectives with their gradients, on buffers of one rank's elements.
//!
//! The gradient is that of **the sum of all ranks' losses**: what every rank gets when each starts a backward from a loss of
//! its own. Where all ranks hold one and the same loss, and it is to count once, the output is [`Copies::Invariant`]. Which
//! of the two is meant is the question of pytorch issue 58005; `docs/gradients.md` answers it, and [`dist`](crate::dist)
//! has the compiler ask it.
//!
//! With `g` the cotangents of the outputs, `W` members, and sums over the members `k`:
//!
//! | collective | backward, of copies that are `Replicate` | of copies that are `Invariant` |
//! |---|---|---|
//! | all_reduce sum | sum of `g_k` | `g` |
//! | all_reduce avg | sum of `g_k`, over `W` | `g / W` |
//! | all_reduce premultiplied by `c` | `c` times the sum of `g_k` | `c g` |
//! | all_reduce product | sum of `g_k`, times the product of the others' elements | `g` times that product |
//! | all_reduce min, max | sum of `g_k`, shared evenly by those who hold the extreme | `g`, shared so |
//! | all_gather | reduce_scatter sum | the own part of `g` |
//! | broadcast | reduce sum to the root | `g`, at the root |
//! | reduce_scatter | all_gather, then as all_reduce | |
//! | reduce | broadcast, then as all_reduce | |
//! | gather, scatter | scatter, gather | |
//! | all_to_all, permute, send | the way back | |
//! | scan | scan from the other end | |
//!
//! The formulas are those of the discussion in pytorch issue 58005 and of the adjoints of linear maps; a product's uses the
//! products of the others, never a quotient, so that zeros are no exception.

mod backward;
mod check;
mod conversion;
mod element;
mod exchange;
mod extremes;
mod forward;
mod products;
mod scan;
mod share;

pub use self::backward::Backward;
pub use self::element::Differentiable;

use std::fmt;

use hsdp_comm::{Group, Tag};

use crate::error::Error;

/// Elements of a product, on one rank, above which it is refused: its backward moves them all twice and keeps the input,
/// and what has so many factors is seldom meant.
pub const MAX_PRODUCT: usize = 1 << 24;

/// A collective, or a conversion whose backward may be one.
///
/// Every member of a group applies the same, in the same order. Parts are equal and in member order; counts are elements.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Collective {
    /// Everybody gets the reduction of everybody's elements. `[n]` to `[n]`.
    AllReduce {
        /// How elements are combined.
        reducer: Reducer,
        /// What the copies of the output are.
        output: Copies,
    },
    /// Member `i` gets the reduction of everybody's `i`-th part. `[size * n]` to `[n]`.
    ReduceScatter {
        /// How elements are combined.
        reducer: Reducer,
    },
    /// Everybody gets everybody's elements. `[n]` to `[size * n]`.
    AllGather {
        /// What the copies of the output are.
        output: Copies,
    },
    /// Everybody gets the root's elements. `[n]` to `[n]`; other inputs are not read, and get no gradient.
    Broadcast {
        /// Its index in the group.
        root: usize,
        /// What the copies of the output are.
        output: Copies,
    },
    /// The root gets the reduction of everybody's elements. `[n]` to `[n]` at the root, to nothing elsewhere.
    Reduce {
        /// Its index in the group.
        root: usize,
        /// How elements are combined.
        reducer: Reducer,
    },
    /// The root gets everybody's elements. `[n]` to `[size * n]` at the root, to nothing elsewhere.
    Gather {
        /// Its index in the group.
        root: usize,
    },
    /// Member `i` gets the root's `i`-th part. `[size * n]` to `[n]`; other inputs are as long, are not read, and get no
    /// gradient.
    Scatter {
        /// Its index in the group.
        root: usize,
    },
    /// Member `i` gets the part that each member cut for it.
    AllToAll {
        /// How many elements go to each member.
        send: Vec<usize>,
        /// How many come from each.
        receive: Vec<usize>,
    },
    /// Each member hands its elements on to at most one. `[n]` to `[n]`; who gets none has zeros.
    Permute {
        /// To whom each member hands its elements. The same list on all members.
        destinations: Vec<Option<usize>>,
    },
    /// This member gives its elements to another. `[n]` to nothing.
    Send {
        /// Its index in the group.
        to: usize,
    },
    /// This member takes the elements of another. `[n]`, which is not read, to `[n]`.
    Receive {
        /// Its index in the group.
        from: usize,
    },
    /// Member `i` gets the sum of the elements of the members up to and with itself. `[n]` to `[n]`.
    Scan,
    /// What all hold and count once becomes what each uses in its own way. `[n]` to `[n]`, the same elements; the backward
    /// is an all_reduce.
    Share,
    /// Each member keeps its own part of what all hold. `[size * n]` to `[n]`; the backward of copies that are `Invariant`
    /// is an all_gather.
    Slice {
        /// What the copies of the input are.
        input: Copies,
    },
    /// Each member's elements become its part of a whole whose other parts are zeros. `[n]` to `[size * n]`.
    Place,
    /// The first member keeps its elements, the others get zeros: what all hold becomes a sum. `[n]` to `[n]`.
    OnlyFirst,
}

/// How a differentiable reduction combines elements.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reducer {
    /// Their sum.
    Sum,
    /// Their sum, divided by the number of members.
    Avg,
    /// Their product; of at most [`MAX_PRODUCT`] elements.
    Product,
    /// The smallest, NaN if one is NaN. The gradient goes to those who hold it, in equal shares.
    Min,
    /// The largest, NaN if one is NaN. The gradient goes to those who hold it, in equal shares.
    Max,
    /// The sum, where each member multiplies its elements by a factor of its own first.
    PreMultiplied(f64),
}

/// What the copies are that all members hold of the same elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copies {
    /// Each member goes on with its copy in its own way, so their cotangents add up.
    Replicate,
    /// All members go on alike, and what they do counts once.
    Invariant,
}

impl Collective {
    /// Applies it: this member's output, where it has one, and what the gradient needs.
    ///
    /// **Collective** over the group, under `tag` (but for `Share`, `Slice`, `Place` and `OnlyFirst`, which move nothing
    /// here). Waits for the output, except that of a `Send`.
    ///
    /// # Errors
    /// [`Error::Collective`] if the input, a count, a root or a list does not fit the group: before anything is issued.
    /// [`Error::Comm`] if the communication fails.
    pub fn forward<T: Differentiable>(
        &self,
        group: &Group,
        tag: Tag,
        input: Vec<T>,
    ) -> Result<(Option<Vec<T>>, Backward<T>), Error> {
        self.check(group, input.len())?;
        forward::apply(self, group, tag, input)
    }

    /// Its name, as that of the [`hsdp_comm::Op`] where there is one.
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
