//! Collectives that have a gradient: their reductions, the inputs that fit them, and the types of
//! their elements.

use std::fmt;

use half::{bf16, f16};
use hsdp_comm::{Group, Reduction};
use hsdp_kernels::Element;

use crate::error::Error;

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
    /// The product. Its backward keeps the input, and moves all elements twice.
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

impl Reducer {
    /// Returns the reduction of elements that each member has multiplied by its factor, if any.
    pub(super) const fn reduction(self) -> Reduction {
        match self {
            Self::Sum | Self::PreMultiplied(_) => Reduction::Sum,
            Self::Avg => Reduction::Avg,
            Self::Product => Reduction::Product,
            Self::Min => Reduction::Min,
            Self::Max => Reduction::Max,
        }
    }
}

impl Collective {
    /// Returns the collective's name: that of the [`Op`](crate::Op) where there is one.
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

    /// Returns the number of elements of this member's output for an input of `len`; `None` where
    /// it has no output.
    pub(super) fn output_len(&self, group: &Group, len: usize) -> Option<usize> {
        let size = group.size();
        match self {
            Self::Reduce { root, .. } => (group.index() == *root).then_some(len),
            Self::Gather { root } => (group.index() == *root).then_some(len * size),
            Self::Send { .. } => None,
            Self::AllGather { .. } | Self::Place => Some(len * size),
            Self::ReduceScatter { .. } | Self::Scatter { .. } | Self::Slice { .. } => {
                Some(len / size)
            }
            Self::AllToAll { receive, .. } => Some(receive.iter().sum()),
            _ => Some(len),
        }
    }

    /// Returns the operation that combines elements, if this is a reduction.
    pub(super) const fn reducer(&self) -> Option<Reducer> {
        match self {
            Self::AllReduce { reducer, .. }
            | Self::ReduceScatter { reducer }
            | Self::Reduce { reducer, .. } => Some(*reducer),
            _ => None,
        }
    }

    /// Checks that an input of `len` elements, and the collective's root, factor, counts or list,
    /// fit `group`.
    pub(super) fn check(&self, group: &Group, len: usize) -> Result<(), Error> {
        self.fits(group, len).map_err(|what| self.refuse(group, what))
    }

    pub(super) fn refuse(&self, group: &Group, what: String) -> Error {
        Error::Collective { operation: self.name(), rank: group.rank(), what }
    }

    fn fits(&self, group: &Group, len: usize) -> Result<(), String> {
        let size = group.size();
        let parts = match self {
            Self::ReduceScatter { .. } | Self::Scatter { .. } | Self::Slice { .. } => size,
            _ => 1,
        };
        if !len.is_multiple_of(parts) {
            return Err(format!(
                "the input has {len} elements, which {size} members cannot share evenly"
            ));
        }
        match self {
            Self::Reduce { root, .. }
            | Self::Scatter { root }
            | Self::Broadcast { root, .. }
            | Self::Gather { root } => is_member(size, "the root", *root)?,
            Self::Send { to } => is_member(size, "the destination", *to)?,
            Self::Receive { from } => is_member(size, "the source", *from)?,
            Self::AllToAll { send, receive } => splits_fit(group, len, send, receive)?,
            Self::Permute { destinations } => destinations_fit(size, destinations)?,
            _ => {}
        }
        match self.reducer() {
            Some(Reducer::PreMultiplied(factor)) if !factor.is_finite() => {
                Err(format!("the factor {factor} is not finite"))
            }
            _ => Ok(()),
        }
    }
}

fn is_member(size: usize, what: &str, member: usize) -> Result<(), String> {
    if member < size {
        return Ok(());
    }
    Err(format!("{what} is member {member}, but the group has {size} members"))
}

fn splits_fit(group: &Group, len: usize, send: &[usize], receive: &[usize]) -> Result<(), String> {
    let size = group.size();
    if send.len() != size || receive.len() != size {
        return Err(format!(
            "it has {} counts to send and {} to receive, for {size} members",
            send.len(),
            receive.len()
        ));
    }
    // Counts whose sum overflows cannot belong to this input.
    let sum = send.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count));
    if sum != Some(len) {
        return Err(format!("the input has {len} elements, the counts to send are {send:?}"));
    }
    let to_itself = send[group.index()];
    let from_itself = receive[group.index()];
    if to_itself != from_itself {
        return Err(format!(
            "this member sends {to_itself} elements to itself and expects {from_itself} from itself"
        ));
    }
    Ok(())
}

fn destinations_fit(size: usize, destinations: &[Option<usize>]) -> Result<(), String> {
    if destinations.len() != size {
        return Err(format!("it has {} destinations for {size} members", destinations.len()));
    }
    let mut sources = vec![None; size];
    for (from, to) in destinations.iter().enumerate() {
        let Some(to) = *to else { continue };
        is_member(size, "a destination", to)?;
        if let Some(other) = sources[to].replace(from) {
            return Err(format!("members {other} and {from} both send to member {to}"));
        }
    }
    Ok(())
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A type of elements that have a gradient: `f64`, `f32`, `f16` or `bf16`.
///
/// Arithmetic between the collectives is done in f64, and rounded once. Integers have no gradient:
///
/// ```compile_fail,E0277
/// # use hsdp::collective::{Collective, Copies, Reducer};
/// # use hsdp_comm::{Channel, Tag, World};
/// let group = World::single().world_group(Channel::User);
/// let sum = Collective::AllReduce { reducer: Reducer::Sum, output: Copies::Replicate };
/// sum.forward(&group, Tag::default(), vec![1_i64]).map(drop)?; // no: i64 has no gradient
/// # Ok::<(), hsdp::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "elements of type `{Self}` have no gradient",
    note = "differentiable collectives take f64, f32, f16 or bf16; `hsdp::Group` has the same \
            collectives for integers"
)]
pub trait Differentiable: Element + sealed::Sealed {
    /// Returns the same value in f64, exactly.
    fn to_f64(self) -> f64;

    /// Rounds `value` to the nearest.
    fn from_f64(value: f64) -> Self;
}

mod sealed {
    #[expect(unnameable_types, reason = "it seals `Differentiable`")]
    pub trait Sealed {}
}

macro_rules! differentiable {
    ($($element:ty: $to:expr, $from:expr;)+) => {$(
        impl sealed::Sealed for $element {}

        impl Differentiable for $element {
            fn to_f64(self) -> f64 {
                $to(self)
            }

            fn from_f64(value: f64) -> Self {
                $from(value)
            }
        }
    )+};
}

differentiable! {
    f64: f64::from, f64::from;
    f32: f64::from, to_nearest_f32;
    f16: f16::to_f64, f16::from_f64;
    bf16: bf16::to_f64, bf16::from_f64;
}

#[expect(clippy::cast_possible_truncation, reason = "it rounds to the nearest")]
fn to_nearest_f32(value: f64) -> f32 {
    value as f32
}
