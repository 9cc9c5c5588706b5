//! Values with a type on each axis of the mesh, so that a wrong collective does not compile.
//!
//! The ranks along an axis each hold a value. What these are to each other is the value's state there:
//!
//! | state | the ranks hold | its cotangents are |
//! |---|---|---|
//! | [`Replicate`] | the same; each goes on with it in its own way | [`Partial`]: they add up |
//! | [`Invariant`] | the same, and all go on alike: it counts once | [`Invariant`] |
//! | [`Varying`] | values of their own | [`Varying`] |
//! | [`Partial`] | terms of a sum that is still to be made | [`Replicate`] |
//!
//! A [`Dist<C, R, S>`](Dist) has state `R` over the replicate axis and `S` over the shard axis. Its methods are what leaves
//! the sum of all ranks' losses differentiable: collectives and conversions move between states, and functions of values
//! are allowed where they mean what they say.
//!
//! | method | from | to | backward |
//! |---|---|---|---|
//! | [`all_reduce`](Dist::all_reduce) of a sum | Partial | Replicate | all_reduce |
//! | [`all_reduce_invariant`](Dist::all_reduce_invariant) of a sum | Partial | Invariant | nothing |
//! | the same of product, min, max | Varying | Replicate, Invariant | all_reduce, nothing; then what others brought |
//! | [`all_gather`](Dist::all_gather) | Varying | Replicate | reduce_scatter |
//! | [`all_gather_invariant`](Dist::all_gather_invariant) | Varying | Invariant | the own part |
//! | [`reduce_scatter`](Dist::reduce_scatter) of a sum | Partial | Varying | all_gather |
//! | [`share`](Dist::share) | Invariant | Replicate | all_reduce |
//! | [`to_varying`](Dist::to_varying) | Replicate | Varying | nothing |
//! | [`to_partial`](Dist::to_partial) | Varying | Partial | nothing |
//! | [`slice`](Dist::slice) | Replicate, Invariant | Varying | zeros elsewhere, all_gather |
//! | [`place`](Dist::place) | Varying | Partial | the own part |
//! | [`only_first`](Dist::only_first) | Replicate | Partial | zeros but on the first rank |
//! | all_to_all, permute, send, receive, scan, broadcast, gather, scatter, reduce | | | the way back |
//!
//! [`backward`](Dist::backward) takes a Partial loss, the terms of one sum, or an Invariant one, which all ranks hold and
//! which counts once. A Replicate loss would count once for each rank: that is pytorch issue 58005, and does not compile.
//!
//! The states are those of the types of JAX's `shard_map` with `check_vma`, and of PyTorch's `spmd_types`, which names
//! them R, I, V and P.
//!
//! In reading order: `state`, `axis` (where), `rules` (what may be done, for the compiler), `transitions` (the same at run
//! time), `tagged`, `typed`, `tape` (the order of backwards), `carrier` (what an autograd brings).

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

pub use self::axis::{Along, Axes, MeshAxis, OnBoth, OnReplicate, OnShard};
pub use self::carrier::{Applied, Call, Carrier, Record};
pub use self::rules::{
    Adds, Avg, Copied, CountedOnce, Free, Joins, Loss, Max, Min, Multiplies, Own, PreMultiplied,
    Product, Reduces, Sliced, Sum,
};
pub use self::state::{AxisState, Invariant, Partial, Replicate, State, Varying};
pub use self::tagged::Tagged;
pub use self::tape::{Gradients, Tape};
pub use self::typed::Dist;
