//! The states of the results of [`Dist`]'s methods, which are types, and the collectives that the
//! methods apply.
//!
//! The cases in `tests/compile_fail` test that a method takes no more than it should. Here each
//! method takes the values that it should.

use super::{Row, alone, applied};
use crate::autograd::dist::{
    Avg, Dist, DistState, Invariant, Max, Min, OnBoth, OnReplicate, OnShard, Partial,
    PreMultiplied, Product, Replicate, Sum, Varying,
};
use crate::autograd::operation::{Collective, Copies, Reducer};
use crate::error::Error;

/// The copies of a Replicate output, and of an Invariant one.
const EACH: Copies = Copies::Replicate;
const ONCE: Copies = Copies::Invariant;

/// A value in these states.
fn value<R: DistState, S: DistState>() -> Dist<Row, R, S> {
    alone().assume(Row(vec![3.0]))
}

/// Checks the states of the result, by their types, the collective that was applied for it, if any,
/// and the one element.
fn is<R: DistState, S: DistState>(
    _: R,
    _: S,
    found: Result<Dist<Row, R, S>, Error>,
    collective: impl Into<Option<Collective>>,
    element: f64,
) {
    let found = found.expect("it is allowed");
    assert_eq!(applied(), Vec::from_iter(collective.into()));
    assert_eq!(found.tensor().0, [element]);
}

fn all_reduce(reducer: Reducer, output: Copies) -> Collective {
    Collective::AllReduce { reducer, output }
}

fn reduce_scatter(reducer: Reducer) -> Collective {
    Collective::ReduceScatter { reducer }
}

fn reduce(reducer: Reducer) -> Collective {
    Collective::Reduce { root: 0, reducer }
}

#[test]
fn reductions() {
    let t = value::<Invariant, Partial>();
    let own = value::<Invariant, Varying>();
    let factor = Reducer::PreMultiplied(2.0);
    is(Invariant, Replicate, t.all_reduce(OnShard, Sum), all_reduce(Reducer::Sum, EACH), 3.0);
    is(Invariant, Replicate, t.all_reduce(OnShard, Avg), all_reduce(Reducer::Avg, EACH), 3.0);
    let found = t.all_reduce_invariant(OnShard, Sum);
    is(Invariant, Invariant, found, all_reduce(Reducer::Sum, ONCE), 3.0);
    is(Invariant, Varying, t.reduce_scatter(OnShard, Avg), reduce_scatter(Reducer::Avg), 3.0);
    let found = own.all_reduce(OnShard, Product);
    is(Invariant, Replicate, found, all_reduce(Reducer::Product, EACH), 3.0);
    is(Invariant, Replicate, own.all_reduce(OnShard, Min), all_reduce(Reducer::Min, EACH), 3.0);
    let found = own.all_reduce_invariant(OnShard, Max);
    is(Invariant, Invariant, found, all_reduce(Reducer::Max, ONCE), 3.0);
    let found = own.all_reduce_invariant(OnShard, PreMultiplied(2.0));
    is(Invariant, Invariant, found, all_reduce(factor, ONCE), 6.0);
    is(Invariant, Varying, own.reduce_scatter(OnShard, Max), reduce_scatter(Reducer::Max), 3.0);
    let root = t.reduce(OnShard, 0, Sum).map(|reduced| reduced.expect("at the root"));
    is(Invariant, Varying, root, reduce(Reducer::Sum), 3.0);
    let root = own.reduce(OnShard, 0, Product).map(|reduced| reduced.expect("at the root"));
    is(Invariant, Varying, root, reduce(Reducer::Product), 3.0);
}

#[test]
fn what_travels() {
    let own = value::<Varying, Partial>();
    let gather = |output| Collective::AllGather { output };
    is(Replicate, Partial, own.all_gather(OnReplicate), gather(EACH), 3.0);
    is(Invariant, Partial, own.all_gather_invariant(OnReplicate), gather(ONCE), 3.0);
    let broadcast = |output| Collective::Broadcast { root: 0, output };
    is(Replicate, Partial, own.broadcast(OnReplicate, 0), broadcast(EACH), 3.0);
    is(Invariant, Partial, own.broadcast_invariant(OnReplicate, 0), broadcast(ONCE), 3.0);
    is(Varying, Partial, own.scatter(OnReplicate, 0), Collective::Scatter { root: 0 }, 3.0);
    let found = own.all_to_all(OnReplicate, vec![1], vec![1]);
    let expected = Collective::AllToAll { send: vec![1], receive: vec![1] };
    is(Varying, Partial, found, expected, 3.0);
    let expected = Collective::Permute { destinations: vec![None] };
    is(Varying, Partial, own.permute(OnReplicate, vec![None]), expected, 0.0);
    is(Varying, Partial, own.scan(OnReplicate), Collective::Scan, 3.0);
    let root = own.gather(OnReplicate, 0).map(|gathered| gathered.expect("at the root"));
    is(Varying, Partial, root, Collective::Gather { root: 0 }, 3.0);
    own.send(OnReplicate, 0).expect("given");
    assert_eq!(applied(), [Collective::Send { to: 0 }]);
    is(Varying, Partial, own.receive(OnReplicate, 0), Collective::Receive { from: 0 }, 3.0);
}

#[test]
fn conversions() {
    let copied = value::<Partial, Replicate>();
    let once = value::<Partial, Invariant>();
    let own = value::<Partial, Varying>();
    is(Partial, Varying, copied.to_varying(OnShard), None, 3.0);
    is(Partial, Varying, copied.slice(OnShard), Collective::Slice { input: EACH }, 3.0);
    is(Partial, Partial, copied.only_first(OnShard), Collective::OnlyFirst, 3.0);
    is(Partial, Replicate, once.share(OnShard), Collective::Share, 3.0);
    is(Partial, Varying, once.slice(OnShard), Collective::Slice { input: ONCE }, 3.0);
    is(Partial, Partial, own.to_partial(OnShard), None, 3.0);
    is(Partial, Partial, own.place(OnShard), Collective::Place, 3.0);
}

#[test]
fn the_whole_mesh() {
    let sum = value::<Partial, Partial>().all_reduce(OnBoth, Sum);
    is(Replicate, Replicate, sum, all_reduce(Reducer::Sum, EACH), 3.0);
    let gathered = value::<Varying, Varying>().all_gather_invariant(OnBoth);
    is(Invariant, Invariant, gathered, Collective::AllGather { output: ONCE }, 3.0);
    is(Varying, Varying, value::<Replicate, Replicate>().to_varying(OnBoth), None, 3.0);
    let shared = value::<Invariant, Invariant>().share(OnBoth);
    is(Replicate, Replicate, shared, Collective::Share, 3.0);
}

#[test]
fn functions() {
    let tape = alone();
    let double = |row: &Row| Ok(Row(vec![2.0 * row.0[0]]));
    let first = |one: &Row, _: &Row| Ok(one.clone());
    let copied: Dist<Row, Replicate, Replicate> = tape.assume(Row(vec![3.0]));
    let own: Dist<Row, Replicate, Varying> = tape.assume(Row(vec![4.0]));
    let terms: Dist<Row, Replicate, Partial> = tape.assume(Row(vec![5.0]));
    is(Replicate, Varying, own.map(double), None, 8.0);
    is(Replicate, Partial, terms.map_linear(double), None, 10.0);
    is(Replicate, Varying, copied.zip(&own, first), None, 3.0);
    is(Replicate, Varying, own.zip_sum(&copied, first), None, 4.0);
    is(Replicate, Partial, terms.zip_sum(&terms, first), None, 5.0);
    is(Replicate, Partial, copied.zip_product(&terms, first), None, 3.0);
    // Each axis has a rule of its own.
    let other: Dist<Row, Varying, Replicate> = tape.assume(Row(vec![6.0]));
    is(Varying, Varying, other.zip(&own, first), None, 6.0);
    is(Varying, Partial, other.zip_product(&terms, first), None, 6.0);
}

/// The cotangents of a Replicate value are terms of a sum, and those of a Partial one are the same
/// on all ranks.
#[test]
fn gradients() {
    let tape = alone();
    let loss: Dist<Row, Partial, Invariant> = tape.assume(Row(vec![1.0]));
    let gradients = loss.backward().expect("a loss");
    let one: Dist<Row, Replicate, Invariant> = tape.assume(Row(vec![3.0]));
    let other: Dist<Row, Partial, Varying> = tape.assume(Row(vec![4.0]));
    let swapped: Dist<Row, Varying, Replicate> = tape.assume(Row(vec![5.0]));
    is(Partial, Invariant, Ok(gradients.of(&one).expect("it is reached")), None, 3.0);
    is(Replicate, Varying, Ok(gradients.of(&other).expect("it is reached")), None, 4.0);
    is(Varying, Partial, Ok(gradients.of(&swapped).expect("it is reached")), None, 5.0);
}

#[test]
fn a_value_shows_its_states() {
    let shown = format!("{:?}", value::<Partial, Varying>());
    assert_eq!(shown, "Dist<Partial, Varying>(Row([3.0]))");
}
