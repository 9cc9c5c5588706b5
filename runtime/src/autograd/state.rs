//! The states of a value along an axis of the mesh, and the operations that each state allows.
//! States are types and operations have bounds, so the compiler refuses those that are not allowed.
//!
//! Rules for two states are symmetric. The bound is on the second value's state, with the first
//! one's as its parameter. In the other direction the compiler would assume, for a type that is
//! still to be inferred, the only one that fits, and report only that it found another.

use std::fmt::Debug;

use super::operation::{Copies, Reducer};

/// An axis that a method goes along: [`OnReplicate`], [`OnShard`], or [`OnBoth`] for the whole
/// mesh.
pub trait MeshAxis: Copy + Debug {
    /// The axis as a value.
    const AXES: Axes;
}

/// The axes of a [`MeshAxis`], as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axes {
    /// The replicate axis.
    Replicate,
    /// The shard axis.
    Shard,
    /// The whole mesh, in rank order.
    Both,
}

/// Along the replicate axis.
#[derive(Clone, Copy, Debug)]
pub struct OnReplicate;

/// Along the shard axis.
#[derive(Clone, Copy, Debug)]
pub struct OnShard;

/// Over the whole mesh, in rank order. For values in the same state on both axes.
#[derive(Clone, Copy, Debug)]
pub struct OnBoth;

impl MeshAxis for OnReplicate {
    const AXES: Axes = Axes::Replicate;
}

impl MeshAxis for OnShard {
    const AXES: Axes = Axes::Shard;
}

impl MeshAxis for OnBoth {
    const AXES: Axes = Axes::Both;
}

/// A state as a type: [`Replicate`], [`Invariant`], [`Varying`] or [`Partial`]. Sealed.
pub trait DistState: sealed::Sealed + Copy + Debug {
    /// The state's name.
    const NAME: &'static str;

    /// The state of its cotangents.
    type Cotangent: DistState;
}

mod sealed {
    #[expect(unnameable_types, reason = "it seals `DistState`")]
    pub trait Sealed {}
}

macro_rules! states {
    ($($(#[$doc:meta])+ $state:ident: $cotangent:ident;)+) => {$(
        $(#[$doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $state;

        impl sealed::Sealed for $state {}

        impl DistState for $state {
            const NAME: &'static str = stringify!($state);
            type Cotangent = $cotangent;
        }
    )+};
}

states! {
    /// All ranks hold the same, and each uses it in its own way, so that cotangents add up.
    Replicate: Partial;
    /// All ranks hold the same and use it in the same way: it counts once.
    Invariant: Invariant;
    /// Each rank holds a value of its own.
    Varying: Varying;
    /// Each rank holds a term of a sum that is still to be made.
    Partial: Replicate;
}

/// A state in which any function of the value is allowed: all but [`Partial`].
#[diagnostic::on_unimplemented(
    message = "a function that is not linear cannot be taken of a `{Self}` value",
    label = "the function of a sum is not the sum of the function",
    note = "sum the value first, by `all_reduce` or `reduce_scatter`; if the function is linear, \
            use `map_linear`"
)]
pub trait Free: DistState {}

impl Free for Replicate {}
impl Free for Invariant {}
impl Free for Varying {}

/// Two states whose values may go into one function, whatever it is.
#[diagnostic::on_unimplemented(
    message = "a `{Rhs}` value and a `{Self}` value cannot go into one function",
    label = "their gradients would count for different numbers of ranks",
    note = "an Invariant value becomes Replicate by `share`; sum a Partial one first, by \
            `all_reduce` or `reduce_scatter`"
)]
pub trait Joins<Rhs: DistState>: DistState {
    /// The state of the function's result.
    type Output: DistState;
}

/// Two states whose values may be added, or go into one function that is linear in both together.
#[diagnostic::on_unimplemented(
    message = "a `{Rhs}` value and a `{Self}` value cannot be added",
    label = "the sum would have terms that count for different numbers of ranks",
    note = "a Replicate value is added to a Partial one as `only_first`, a Varying one as \
            `to_partial`; an Invariant value becomes Replicate by `share`"
)]
pub trait Adds<Rhs: DistState>: DistState {
    /// The state of the sum.
    type Output: DistState;
}

/// Two states whose values may be multiplied, or go into one function that is linear in each.
#[diagnostic::on_unimplemented(
    message = "a `{Rhs}` value and a `{Self}` value cannot be multiplied",
    label = "the product of two sums is not the sum of products",
    note = "sum a Partial value first, by `all_reduce` or `reduce_scatter`; an Invariant value \
            becomes Replicate by `share`"
)]
pub trait Multiplies<Rhs: DistState>: DistState {
    /// The state of the product.
    type Output: DistState;
}

/// Declares a rule for two states: the pairs that it allows, and the state of each result.
macro_rules! table {
    ($rule:ident: $($left:ident, $right:ident => $output:ident;)+) => {
        $(impl $rule<$right> for $left {
            type Output = $output;
        })+
    };
}

table! { Joins:
    Replicate, Replicate => Replicate;
    Varying, Varying => Varying;
    Replicate, Varying => Varying;
    Varying, Replicate => Varying;
    Invariant, Invariant => Invariant;
}

table! { Adds:
    Replicate, Replicate => Replicate;
    Varying, Varying => Varying;
    Replicate, Varying => Varying;
    Varying, Replicate => Varying;
    Invariant, Invariant => Invariant;
    Partial, Partial => Partial;
}

table! { Multiplies:
    Replicate, Replicate => Replicate;
    Varying, Varying => Varying;
    Replicate, Varying => Varying;
    Varying, Replicate => Varying;
    Invariant, Invariant => Invariant;
    Replicate, Partial => Partial;
    Partial, Replicate => Partial;
}

/// A reduction as a type, for values in state `Q`: [`Sum`] and [`Avg`] reduce Partial values, the
/// others Varying ones.
///
/// Along the other axis the value is in state `Beside`. Product, Min and Max are not linear, so
/// that state is not Partial either: the largest of terms is not a term of the largest.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not reduce a `{Q}` value",
    note = "Sum and Avg reduce Partial values: a Varying one becomes Partial by `to_partial`",
    note = "Product, Min, Max and PreMultiplied reduce Varying values: sum a Partial one first, \
            by `reduce_scatter`",
    note = "a Replicate or Invariant value is the same on all ranks already"
)]
pub trait Reduces<Q: DistState, Beside: DistState = Varying> {
    /// Returns the reduction as a value.
    fn reducer(self) -> Reducer;
}

macro_rules! reducers {
    ($($(#[$doc:meta])+ $reducer:ident: $state:ident beside $beside:ident;)+) => {$(
        $(#[$doc])+
        #[derive(Clone, Copy, Debug)]
        pub struct $reducer;

        impl<Beside: $beside> Reduces<$state, Beside> for $reducer {
            fn reducer(self) -> Reducer {
                Reducer::$reducer
            }
        }
    )+};
}

reducers! {
    /// [`Reducer::Sum`] of Partial values.
    Sum: Partial beside DistState;
    /// [`Reducer::Avg`] of Partial values.
    Avg: Partial beside DistState;
    /// [`Reducer::Product`] of Varying values.
    Product: Varying beside Free;
    /// [`Reducer::Min`] of Varying values.
    Min: Varying beside Free;
    /// [`Reducer::Max`] of Varying values.
    Max: Varying beside Free;
}

/// [`Reducer::PreMultiplied`] of Varying values, by this rank's factor. Along the axis that it
/// reduces each rank has a factor of its own. Along the other axis the factor may differ only where
/// the value does.
#[derive(Clone, Copy, Debug)]
pub struct PreMultiplied(pub f64);

impl<Beside: DistState> Reduces<Varying, Beside> for PreMultiplied {
    fn reducer(self) -> Reducer {
        Reducer::PreMultiplied(self.0)
    }
}

/// The state in which each rank has a value of its own: [`Varying`].
#[diagnostic::on_unimplemented(
    message = "a `{Self}` value is not each rank's own: this takes a Varying value",
    note = "a Replicate value becomes Varying by `to_varying`, an Invariant one by `slice`; sum a \
            Partial one first, by `all_reduce` or `reduce_scatter`",
    note = "terms of a sum in which a Replicate value counts once are made by `only_first`, not \
            by `to_partial`"
)]
pub trait Own: DistState {}

impl Own for Varying {}

/// The state in which all ranks hold a value, and each uses it in its own way: [`Replicate`].
#[diagnostic::on_unimplemented(
    message = "a `{Self}` value is not one that all ranks hold and each uses in its own way: this \
               takes a Replicate value",
    note = "an Invariant value becomes Replicate by `share`, a Varying one Partial by `to_partial`"
)]
pub trait Copied: DistState {}

impl Copied for Replicate {}

/// The state in which all ranks hold a value, and it counts once: [`Invariant`].
#[diagnostic::on_unimplemented(
    message = "a `{Self}` value is not one that all ranks hold and that counts once: this takes \
               an Invariant value",
    note = "a Replicate value needs no `share`: each rank uses it in its own way already"
)]
pub trait CountedOnce: DistState {}

impl CountedOnce for Invariant {}

/// A state of which each rank may keep its own part: [`Replicate`] or [`Invariant`].
#[diagnostic::on_unimplemented(
    message = "a `{Self}` value has no own parts to keep",
    note = "`slice` cuts values that all ranks hold: Replicate or Invariant ones; a Partial one \
            is cut by `reduce_scatter`, and a Varying one is each rank's own already"
)]
pub trait Sliced: DistState {
    /// The meaning of the copies.
    const COPIES: Copies;
}

impl Sliced for Replicate {
    const COPIES: Copies = Copies::Replicate;
}

impl Sliced for Invariant {
    const COPIES: Copies = Copies::Invariant;
}

/// The state, on an axis, of a loss from which a backward may start: [`Partial`], of which the
/// ranks hold the terms, or [`Invariant`], which all ranks hold and which counts once.
#[diagnostic::on_unimplemented(
    message = "a `{Self}` loss has no one meaning: on each axis a loss is Partial or Invariant",
    label = "does each rank's loss count, or one? This is pytorch issue 58005",
    note = "the sum of the ranks' losses is a Partial loss: `to_partial` of a Varying one",
    note = "one loss that all ranks hold is Invariant: `all_reduce_invariant` makes it",
    note = "of a Replicate loss, `only_first` counts one copy"
)]
pub trait Loss: DistState {}

impl Loss for Partial {}
impl Loss for Invariant {}
