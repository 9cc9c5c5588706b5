//! The rules that the compiler applies to states: what each allows, and what it refuses.
//!
//! A constant of a type asks the compiler: where its bounds hold, the inherent constant is found
//! first, and has the result; where they do not, the trait's constant is found.

use std::marker::PhantomData;

use crate::autograd::operation::Copies;
use crate::autograd::state::{
    Adds, Avg, Copied, CountedOnce, DistState, Free, Invariant, Joins, Loss, Max, Min, Multiplies,
    Own, Partial, PreMultiplied, Product, Reduces, Replicate, Sliced, Sum, Varying,
};

/// The name of a state, if there is one.
type Name = Option<&'static str>;

trait Forbidden {
    const JOINED: Name = None;
    const ADDED: Name = None;
    const MULTIPLIED: Name = None;
    const REDUCES: bool = false;
    const FREE: bool = false;
    const OWN: bool = false;
    const COPIED: bool = false;
    const COUNTED_ONCE: bool = false;
    const SLICED: Option<Copies> = None;
    const LOSS: bool = false;
}

/// The states of two values.
struct Two<A, B>(PhantomData<(A, B)>);

impl<A, B> Forbidden for Two<A, B> {}

impl<A: DistState, B: Joins<A>> Two<A, B> {
    const JOINED: Name = Some(B::Output::NAME);
}

impl<A: DistState, B: Adds<A>> Two<A, B> {
    const ADDED: Name = Some(B::Output::NAME);
}

impl<A: DistState, B: Multiplies<A>> Two<A, B> {
    const MULTIPLIED: Name = Some(B::Output::NAME);
}

/// A reduction, and the states of a value along the axis that it reduces and along the other one.
struct Reduced<A, Q, B>(PhantomData<(A, Q, B)>);

impl<A, Q, B> Forbidden for Reduced<A, Q, B> {}

impl<A: Reduces<Q, B>, Q: DistState, B: DistState> Reduced<A, Q, B> {
    const REDUCES: bool = true;
}

struct One<Q>(PhantomData<Q>);

impl<Q> Forbidden for One<Q> {}

impl<Q: Free> One<Q> {
    const FREE: bool = true;
}

impl<Q: Own> One<Q> {
    const OWN: bool = true;
}

impl<Q: Copied> One<Q> {
    const COPIED: bool = true;
}

impl<Q: CountedOnce> One<Q> {
    const COUNTED_ONCE: bool = true;
}

impl<Q: Sliced> One<Q> {
    const SLICED: Option<Copies> = Some(Q::COPIES);
}

impl<Q: Loss> One<Q> {
    const LOSS: bool = true;
}

/// Returns an array of a rule's result for each pair of states: one row for each first value.
macro_rules! pairs {
    ($rule:ident) => {
        pairs! { $rule: Replicate Invariant Varying Partial }
    };
    ($rule:ident: $($first:ident)+) => {
        [$([
            Two::<$first, Replicate>::$rule,
            Two::<$first, Invariant>::$rule,
            Two::<$first, Varying>::$rule,
            Two::<$first, Partial>::$rule,
        ],)+]
    };
}

const R: Name = Some("Replicate");
const I: Name = Some("Invariant");
const V: Name = Some("Varying");
const P: Name = Some("Partial");

#[test]
fn functions_of_two_values_take_them_in_either_order() {
    let joined =
        [[R, None, V, None], [None, I, None, None], [V, None, V, None], [None, None, None, None]];
    let added =
        [[R, None, V, None], [None, I, None, None], [V, None, V, None], [None, None, None, P]];
    let multiplied =
        [[R, None, V, P], [None, I, None, None], [V, None, V, None], [P, None, None, None]];
    assert_eq!(pairs! { JOINED }, joined);
    assert_eq!(pairs! { ADDED }, added);
    assert_eq!(pairs! { MULTIPLIED }, multiplied);
}

/// Returns an array of a rule's answer for each state.
macro_rules! singles {
    ($rule:ident) => {
        [
            One::<Replicate>::$rule,
            One::<Invariant>::$rule,
            One::<Varying>::$rule,
            One::<Partial>::$rule,
        ]
    };
}

#[test]
fn functions_of_one_value_and_losses() {
    assert_eq!(singles! { FREE }, [true, true, true, false]);
    assert_eq!(singles! { LOSS }, [false, true, false, true]);
}

#[test]
fn cotangents() {
    fn of<Q: DistState>(_: Q) -> [&'static str; 2] {
        [Q::Cotangent::NAME, <Q::Cotangent as DistState>::Cotangent::NAME]
    }
    assert_eq!(of(Replicate), ["Partial", "Replicate"]);
    assert_eq!(of(Invariant), ["Invariant", "Invariant"]);
    assert_eq!(of(Varying), ["Varying", "Varying"]);
    assert_eq!(of(Partial), ["Replicate", "Partial"]);
}

/// The bounds of methods that reduce nothing. `tests/compile_fail` tests which method has which
/// bound.
#[test]
fn collectives_and_conversions() {
    assert_eq!(singles! { OWN }, [false, false, true, false]);
    assert_eq!(singles! { COPIED }, [true, false, false, false]);
    assert_eq!(singles! { COUNTED_ONCE }, [false, true, false, false]);
    let copies = [Some(Copies::Replicate), Some(Copies::Invariant), None, None];
    assert_eq!(singles! { SLICED }, copies);
}

/// Returns an array of whether a reduction takes a value: one row for each state along the axis
/// that it reduces, one column for each state along the other axis.
macro_rules! reduced {
    ($reduction:ident) => {
        reduced! { $reduction: Replicate Invariant Varying Partial }
    };
    ($reduction:ident: $($along:ident)+) => {
        [$([
            Reduced::<$reduction, $along, Replicate>::REDUCES,
            Reduced::<$reduction, $along, Invariant>::REDUCES,
            Reduced::<$reduction, $along, Varying>::REDUCES,
            Reduced::<$reduction, $along, Partial>::REDUCES,
        ],)+]
    };
}

#[test]
fn reductions() {
    let no = [false; 4];
    for sums in [reduced! { Sum }, reduced! { Avg }] {
        assert_eq!(sums, [no, no, no, [true; 4]]);
    }
    assert_eq!(reduced! { PreMultiplied }, [no, no, [true; 4], no]);
    // They are not linear, so they take no terms of a sum along the other axis.
    for others in [reduced! { Product }, reduced! { Min }, reduced! { Max }] {
        assert_eq!(others, [no, no, [true, true, true, false], no]);
    }
}
