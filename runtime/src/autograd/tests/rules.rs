//! Each rule of the compiler, against the function for the same rule at run time.
//!
//! A constant of a type asks the compiler: where its bounds hold, the inherent constant is found
//! first, and has the result; where they do not, the trait's constant is found.

use std::marker::PhantomData;

use super::collectives;
use crate::autograd::operation::{Collective, Copies, Reducer};
use crate::autograd::state::{
    Avg, AxisState, Copied, CountedOnce, DistState, Free, Invariant, Loss, Max, Min, Own, Partial,
    PreMultiplied, Product, Reduces, Replicate, Sliced, Sum, Varying,
};

/// A reduction, and the state of a value.
struct Two<A, B>(PhantomData<(A, B)>);

trait Forbidden {
    const REDUCES: bool = false;
    const FREE: bool = false;
    const OWN: bool = false;
    const COPIED: bool = false;
    const COUNTED_ONCE: bool = false;
    const SLICED: Option<Copies> = None;
    const LOSS: bool = false;
}

impl<A, B> Forbidden for Two<A, B> {}

impl<A: Reduces<B>, B: DistState> Two<A, B> {
    const REDUCES: bool = true;
}

/// A reduction of values that are in state `B` along the other axis.
struct Beside<A, B>(PhantomData<(A, B)>);

impl<A, B> Forbidden for Beside<A, B> {}

impl<A: Reduces<Q, B>, Q: DistState, B: DistState> Beside<(A, Q), B> {
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

macro_rules! of_one {
    ($($state:ident)+) => {
        vec![$(OfOne {
            state: AxisState::$state,
            cotangent: <<$state as DistState>::Cotangent as DistState>::STATE,
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

fn singles() -> Vec<OfOne> {
    of_one! { Replicate Invariant Varying Partial }
}

#[test]
fn functions_of_two_values_take_them_in_either_order() {
    let rules = [AxisState::joined, AxisState::added, AxisState::multiplied];
    let allowed = rules.map(|rule| {
        let pairs = AxisState::ALL.into_iter().flat_map(|one| AxisState::ALL.map(|two| (one, two)));
        let of_both = |(one, two)| {
            assert_eq!(rule(one, two).ok(), rule(two, one).ok(), "{one} and {two}");
            rule(one, two).ok()
        };
        pairs.filter_map(of_both).count()
    });
    assert_eq!(allowed, [5, 6, 7]);
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
