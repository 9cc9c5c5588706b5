//! The operations that each state allows, as rules for the compiler, with its messages.
//!
//! The same rules stand as functions of [`AxisState`](super::AxisState) in `transitions`, for values whose states are known at
//! run time only; a test compares the two.
//!
//! Rules of two states are symmetric. The bound is on the second value's state, with the first one's as its parameter.
//! The other way round the compiler would assume, for a type that is still to be inferred, the only one that fits, and
//! report only that it found another.

use super::state::{Invariant, Partial, Replicate, State, Varying};
use crate::autograd::operation::{Copies, Reducer};

/// A state in which any function of the value is allowed: all but [`Partial`].
#[diagnostic::on_unimplemented(
    message = "a function that is not linear cannot be taken of a `{Self}` value",
    label = "the function of a sum is not the sum of the function",
    note = "sum the value first, by `all_reduce` or `reduce_scatter`; if the function is linear, use `map_linear`"
)]
pub trait Free: State {}

impl Free for Replicate {}
impl Free for Invariant {}
impl Free for Varying {}

/// Two states whose values may go into one function, whatever it is.
#[diagnostic::on_unimplemented(
    message = "a `{Rhs}` value and a `{Self}` value cannot go into one function",
    label = "their gradients would count for different numbers of ranks",
    note = "an Invariant value becomes Replicate by `share`; sum a Partial one first, by `all_reduce` or `reduce_scatter`"
)]
pub trait Joins<Rhs: State>: State {
    /// The state of the function's result.
    type Output: State;
}

/// Two states whose values may be added, or go into one function that is linear in both together.
#[diagnostic::on_unimplemented(
    message = "a `{Rhs}` value and a `{Self}` value cannot be added",
    label = "the sum would have terms that count for different numbers of ranks",
    note = "a Replicate value is added to a Partial one as `only_first`, a Varying one as `to_partial`; an Invariant value \
            becomes Replicate by `share`"
)]
pub trait Adds<Rhs: State>: State {
    /// The state of the sum.
    type Output: State;
}

/// Two states whose values may be multiplied, or go into one function that is linear in each.
#[diagnostic::on_unimplemented(
    message = "a `{Rhs}` value and a `{Self}` value cannot be multiplied",
    label = "the product of two sums is not the sum of products",
    note = "sum a Partial value first, by `all_reduce` or `reduce_scatter`; an Invariant value becomes Replicate by `share`"
)]
pub trait Multiplies<Rhs: State>: State {
    /// The state of the product.
    type Output: State;
}

macro_rules! table {
    ($rule:ident: $($left:ident, $right:ident => $output:ident;)+) => {$(
        impl $rule<$right> for $left {
            type Output = $output;
        }
    )+};
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

/// A reduction as a type, for values in state `Q`: [`Sum`] and [`Avg`] reduce Partial values, the others Varying ones.
///
/// Along the other axis the value is in state `Beside`. Product, Min and Max are not linear, so that state is not
/// Partial either: the largest of terms is not a term of the largest.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not reduce a `{Q}` value",
    note = "Sum and Avg reduce Partial values: a Varying one becomes Partial by `to_partial`",
    note = "Product, Min, Max and PreMultiplied reduce Varying values: sum a Partial one first, by `reduce_scatter`",
    note = "a Replicate or Invariant value is the same on all ranks already"
)]
pub trait Reduces<Q: State, Beside: State = Varying> {
    /// The reduction as a value.
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
    Sum: Partial beside State;
    /// [`Reducer::Avg`] of Partial values.
    Avg: Partial beside State;
    /// [`Reducer::Product`] of Varying values.
    Product: Varying beside Free;
    /// [`Reducer::Min`] of Varying values.
    Min: Varying beside Free;
    /// [`Reducer::Max`] of Varying values.
    Max: Varying beside Free;
}

/// [`Reducer::PreMultiplied`] of Varying values, by this rank's factor. Along the axis that it reduces each rank has a
/// factor of its own. Along the other axis the factor may differ only where the value does.
#[derive(Clone, Copy, Debug)]
pub struct PreMultiplied(pub f64);

impl<Beside: State> Reduces<Varying, Beside> for PreMultiplied {
    fn reducer(self) -> Reducer {
        Reducer::PreMultiplied(self.0)
    }
}

/// The state in which each rank has a value of its own: [`Varying`].
#[diagnostic::on_unimplemented(
    message = "a `{Self}` value is not each rank's own: this takes a Varying value",
    note = "a Replicate value becomes Varying by `to_varying`, an Invariant one by `slice`; sum a Partial one first, by \
            `all_reduce` or `reduce_scatter`",
    note = "terms of a sum in which a Replicate value counts once are made by `only_first`, not by `to_partial`"
)]
pub trait Own: State {}

impl Own for Varying {}

/// The state in which all ranks hold a value, and each uses it in its own way: [`Replicate`].
#[diagnostic::on_unimplemented(
    message = "a `{Self}` value is not one that all ranks hold and each uses in its own way: this takes a Replicate value",
    note = "an Invariant value becomes Replicate by `share`, a Varying one Partial by `to_partial`"
)]
pub trait Copied: State {}

impl Copied for Replicate {}

/// The state in which all ranks hold a value, and it counts once: [`Invariant`].
#[diagnostic::on_unimplemented(
    message = "a `{Self}` value is not one that all ranks hold and that counts once: this takes an Invariant value",
    note = "a Replicate value needs no `share`: each rank uses it in its own way already"
)]
pub trait CountedOnce: State {}

impl CountedOnce for Invariant {}

/// A state of which each rank may keep its own part: [`Replicate`] or [`Invariant`].
#[diagnostic::on_unimplemented(
    message = "a `{Self}` value has no own parts to keep",
    note = "`slice` cuts values that all ranks hold: Replicate or Invariant ones; a Partial one is cut by \
            `reduce_scatter`, and a Varying one is each rank's own already"
)]
pub trait Sliced: State {
    /// The meaning of the copies.
    const COPIES: Copies;
}

impl Sliced for Replicate {
    const COPIES: Copies = Copies::Replicate;
}

impl Sliced for Invariant {
    const COPIES: Copies = Copies::Invariant;
}

/// The state, on an axis, of a loss from which a backward may start: [`Partial`], of which the ranks hold the terms, or
/// [`Invariant`], which all ranks hold and which counts once.
#[diagnostic::on_unimplemented(
    message = "a `{Self}` loss has no one meaning: on each axis a loss is Partial or Invariant",
    label = "does each rank's loss count, or one? This is pytorch issue 58005",
    note = "the sum of the ranks' losses is a Partial loss: `to_partial` of a Varying one",
    note = "one loss that all ranks hold is Invariant: `all_reduce_invariant` makes it",
    note = "of a Replicate loss, `only_first` counts one copy"
)]
pub trait Loss: State {}

impl Loss for Partial {}
impl Loss for Invariant {}
