//! Each rule of the compiler, against the function for the same rule at run time.
//!
//! A constant of a type asks the compiler: where its bounds hold, the inherent constant is found first, and has the
//! result; where they do not, the trait's constant is found.

use std::marker::PhantomData;

use super::collectives;
use crate::autograd::dist::AxisState;
use crate::autograd::dist::rules::{
    Adds, Avg, Copied, CountedOnce, Free, Joins, Loss, Max, Min, Multiplies, Own, PreMultiplied,
    Product, Reduces, Sliced, Sum,
};
use crate::autograd::dist::state::{Invariant, Partial, Replicate, State, Varying};
use crate::autograd::operation::{Collective, Copies, Reducer};

struct Two<A, B>(PhantomData<(A, B)>);

trait Forbidden {
    const JOINED: Option<AxisState> = None;
    const ADDED: Option<AxisState> = None;
    const MULTIPLIED: Option<AxisState> = None;
    const REDUCES: bool = false;
    const FREE: bool = false;
    const OWN: bool = false;
    const COPIED: bool = false;
    const COUNTED_ONCE: bool = false;
    const SLICED: Option<Copies> = None;
    const LOSS: bool = false;
}

impl<A, B> Forbidden for Two<A, B> {}

impl<A: Joins<B>, B: State> Two<A, B> {
    const JOINED: Option<AxisState> = Some(<A::Output as State>::STATE);
}

impl<A: Adds<B>, B: State> Two<A, B> {
    const ADDED: Option<AxisState> = Some(<A::Output as State>::STATE);
}

impl<A: Multiplies<B>, B: State> Two<A, B> {
    const MULTIPLIED: Option<AxisState> = Some(<A::Output as State>::STATE);
}

impl<A: Reduces<B>, B: State> Two<A, B> {
    const REDUCES: bool = true;
}

/// A reduction of values that are in state `B` along the other axis.
struct Beside<A, B>(PhantomData<(A, B)>);

impl<A, B> Forbidden for Beside<A, B> {}

impl<A: Reduces<Q, B>, Q: State, B: State> Beside<(A, Q), B> {
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

/// The compiler's answers for two states.
struct OfTwo {
    states: [AxisState; 2],
    joined: Option<AxisState>,
    added: Option<AxisState>,
    multiplied: Option<AxisState>,
}

/// The compiler's answers for one state.
struct OfOne {
    state: AxisState,
    cotangent: AxisState,
    free: bool,
    own: bool,
    copied: bool,
    counted_once: bool,
    sliced: Option<Copies>,
    loss: bool,
    /// The reductions that take it.
    reduced: Vec<Reducer>,
}

macro_rules! of_two {
    ($($left:ident with $($right:ident)+;)+) => {
        vec![$($(OfTwo {
            states: [AxisState::$left, AxisState::$right],
            joined: Two::<$left, $right>::JOINED,
            added: Two::<$left, $right>::ADDED,
            multiplied: Two::<$left, $right>::MULTIPLIED,
        },)+)+]
    };
}

macro_rules! of_one {
    ($($state:ident)+) => {
        vec![$(OfOne {
            state: AxisState::$state,
            cotangent: <<$state as State>::Cotangent as State>::STATE,
            free: One::<$state>::FREE,
            own: One::<$state>::OWN,
            copied: One::<$state>::COPIED,
            counted_once: One::<$state>::COUNTED_ONCE,
            sliced: One::<$state>::SLICED,
            loss: One::<$state>::LOSS,
            reduced: [
                (Two::<Sum, $state>::REDUCES, Reducer::Sum),
                (Two::<Avg, $state>::REDUCES, Reducer::Avg),
                (Two::<Product, $state>::REDUCES, Reducer::Product),
                (Two::<Min, $state>::REDUCES, Reducer::Min),
                (Two::<Max, $state>::REDUCES, Reducer::Max),
                (Two::<PreMultiplied, $state>::REDUCES, Reducer::PreMultiplied(2.0)),
            ]
            .into_iter()
            .filter_map(|(reduces, reducer)| reduces.then_some(reducer))
            .collect(),
        },)+]
    };
}

fn pairs() -> Vec<OfTwo> {
    of_two! {
        Replicate with Replicate Invariant Varying Partial;
        Invariant with Replicate Invariant Varying Partial;
        Varying with Replicate Invariant Varying Partial;
        Partial with Replicate Invariant Varying Partial;
    }
}

fn singles() -> Vec<OfOne> {
    of_one! { Replicate Invariant Varying Partial }
}

#[test]
fn functions_of_two_values() {
    assert_eq!(pairs().len(), AxisState::ALL.len().pow(2));
    for OfTwo { states: [one, two], joined, added, multiplied } in pairs() {
        assert_eq!(joined, one.joined(two).ok(), "{one} with {two}");
        assert_eq!(added, one.added(two).ok(), "{one} plus {two}");
        assert_eq!(multiplied, one.multiplied(two).ok(), "{one} times {two}");
        // The compiler is asked the other way round.
        let swapped = [two.joined(one).ok(), two.added(one).ok(), two.multiplied(one).ok()];
        assert_eq!(swapped, [joined, added, multiplied], "{two} and {one}");
    }
}

/// Counted, so that a probe which always says no does not agree with a function that does.
#[test]
fn so_many_pairs_are_allowed() {
    let count = |rule: fn(&OfTwo) -> bool| pairs().iter().filter(|pair| rule(pair)).count();
    assert_eq!(count(|pair| pair.joined.is_some()), 5);
    assert_eq!(count(|pair| pair.added.is_some()), 6);
    assert_eq!(count(|pair| pair.multiplied.is_some()), 7);
}

#[test]
fn functions_of_one_value() {
    assert_eq!(singles().iter().map(|one| one.state).collect::<Vec<_>>(), AxisState::ALL);
    for one in singles() {
        let state = one.state;
        assert_eq!(one.free, state.mapped().is_ok(), "{state}");
        assert_eq!(one.loss, state.as_loss().is_ok(), "{state}");
        assert_eq!(one.cotangent, state.cotangent(), "{state}");
        assert_eq!(one.cotangent.cotangent(), state, "cotangents of cotangents");
    }
    let count = |rule: fn(&OfOne) -> bool| singles().iter().filter(|one| rule(one)).count();
    assert_eq!([count(|one| one.free), count(|one| one.loss)], [3, 2]);
}

#[test]
fn conversions_that_move_nothing() {
    for one in singles() {
        let state = one.state;
        assert_eq!(one.copied, state.reinterpreted(AxisState::Varying).is_ok(), "{state}");
        assert_eq!(one.own, state.reinterpreted(AxisState::Partial).is_ok(), "{state}");
        for to in [AxisState::Replicate, AxisState::Invariant] {
            assert!(state.reinterpreted(to).is_err(), "{state} as {to}");
        }
    }
}

/// Whether the compiler lets a value go into a collective.
fn takes(one: &OfOne, collective: &Collective) -> bool {
    match collective {
        Collective::AllReduce { reducer, .. }
        | Collective::ReduceScatter { reducer }
        | Collective::Reduce { reducer, .. } => one.reduced.contains(reducer),
        Collective::Share => one.counted_once,
        Collective::OnlyFirst => one.copied,
        Collective::Slice { input } => one.sliced == Some(*input),
        _ => one.own,
    }
}

#[test]
fn what_collectives_take() {
    let mut taken = 0;
    for collective in collectives() {
        for one in singles() {
            let [from, _] = collective.states();
            assert_eq!(
                takes(&one, &collective),
                one.state == from,
                "{collective:?}: {}",
                one.state
            );
            taken += usize::from(takes(&one, &collective));
        }
    }
    assert_eq!(taken, collectives().len(), "each takes values in one state");
}

macro_rules! beside {
    ($($name:ident $(($factor:literal))?: $along:ident;)+) => {
        [$((Reducer::$name $(($factor))?, [
            Beside::<($name, $along), Replicate>::REDUCES,
            Beside::<($name, $along), Invariant>::REDUCES,
            Beside::<($name, $along), Varying>::REDUCES,
            Beside::<($name, $along), Partial>::REDUCES,
        ]),)+]
    };
}

#[test]
fn reductions_beside_another_axis() {
    let reducers = beside! {
        Sum: Partial;
        Avg: Partial;
        Product: Varying;
        Min: Varying;
        Max: Varying;
        PreMultiplied(2.0): Varying;
    };
    for (reducer, allowed) in reducers {
        let linear = Collective::ReduceScatter { reducer }.is_linear();
        assert_eq!(allowed, AxisState::ALL.map(|beside| linear || beside.mapped().is_ok()));
        assert_eq!(linear, !matches!(reducer, Reducer::Product | Reducer::Min | Reducer::Max));
    }
}
