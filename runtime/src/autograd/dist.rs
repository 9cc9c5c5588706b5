//! Values with a type on each axis of the mesh, so that a wrong collective does not compile.
//!
//! Each rank along an axis holds a value. The value's state on that axis says how these values relate to each other:
//!
//! | state | the ranks hold | its cotangents are |
//! |---|---|---|
//! | [`Replicate`] | the same value; each rank uses it in its own way | [`Partial`]: they add up |
//! | [`Invariant`] | the same value; all ranks use it in the same way, so it counts once | [`Invariant`] |
//! | [`Varying`] | different values | [`Varying`] |
//! | [`Partial`] | terms of a sum that is not computed yet | [`Replicate`] |
//!
//! A [`Dist<C, R, S>`](Dist) has state `R` over the replicate axis and `S` over the shard axis. Its methods keep the sum of all
//! ranks' losses differentiable: collectives and conversions move between states, and a function of values is allowed only in
//! the states in which its result is right.
//!
//! | method | from | to | backward |
//! |---|---|---|---|
//! | [`all_reduce`](Dist::all_reduce) of a sum | Partial | Replicate | all_reduce |
//! | [`all_reduce_invariant`](Dist::all_reduce_invariant) of a sum | Partial | Invariant | nothing |
//! | the same of product, min, max | Varying | Replicate, Invariant | all_reduce, nothing; then an exchange of the other ranks' elements |
//! | [`all_gather`](Dist::all_gather) | Varying | Replicate | reduce_scatter |
//! | [`all_gather_invariant`](Dist::all_gather_invariant) | Varying | Invariant | the own part |
//! | [`reduce_scatter`](Dist::reduce_scatter) of a sum | Partial | Varying | all_gather |
//! | [`share`](Dist::share) | Invariant | Replicate | all_reduce |
//! | [`to_varying`](Dist::to_varying) | Replicate | Varying | nothing |
//! | [`to_partial`](Dist::to_partial) | Varying | Partial | nothing |
//! | [`slice`](Dist::slice) | Replicate, Invariant | Varying | zeros elsewhere, all_gather |
//! | [`place`](Dist::place) | Varying | Partial | the own part |
//! | [`only_first`](Dist::only_first) | Replicate | Partial | zeros but on the first rank |
//! | all_to_all, permute, send, receive, scan, broadcast, gather, scatter, reduce | | | the opposite direction |
//!
//! [`backward`](Dist::backward) takes a Partial loss, which is a term of one sum on each rank, or an Invariant loss, which all
//! ranks hold and which counts once. A Replicate loss would count once for each rank. That is PyTorch issue 58005, and does not
//! compile.
//!
//! The states are those of the types of JAX's `shard_map` with `check_vma`, and of PyTorch's `spmd_types`, which names
//! them R, I, V and P.
//!
//! In reading order: `state`, `axis` (the axes of the mesh), `rules` (the allowed operations, for the
//! compiler), `transitions` (these at run time), `carrier` (the interface to an autograd), `tape`
//! (the order of backwards), `tagged`, `along` (states along an axis, as types), `typed`.

mod along;
mod axis;
mod carrier;
mod rules;
mod state;
mod tagged;
mod tape;
#[cfg(test)]
mod tests;
mod transitions;
mod typed;

pub use self::along::Along;
pub use self::axis::{Axes, MeshAxis, OnBoth, OnReplicate, OnShard};
pub use self::carrier::{Applied, Call, Carrier, Record};
pub use self::rules::{
    Adds, Avg, Copied, CountedOnce, Free, Joins, Loss, Max, Min, Multiplies, Own, PreMultiplied,
    Product, Reduces, Sliced, Sum,
};
pub use self::state::{AxisState, Invariant, Partial, Replicate, State, Varying};
pub use self::tagged::Tagged;
pub use self::tape::{Gradients, Tape};
pub use self::typed::Dist;
