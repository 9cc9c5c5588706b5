//! The states of the results of [`Dist`]'s methods: in the types, and in the tags inside.
//!
//! The cases in `tests/compile_fail` test that a method takes no more than it should. Here each
//! method takes the values that it should, and its result has the state that its type says.

use super::{Row, alone};
use crate::autograd::dist::{
    Avg, Dist, DistState, Invariant, Max, Min, OnBoth, OnReplicate, OnShard, Partial,
    PreMultiplied, Product, Replicate, Sum, Varying,
};
use crate::error::Error;

/// A value in these states.
fn value<R: DistState, S: DistState>() -> Dist<Row, R, S> {
    alone().assume(Row(vec![3.0]))
}

/// Checks that the tags are those of the type, and that the one element is `element`.
fn is<R: DistState, S: DistState>(_: R, _: S, found: Result<Dist<Row, R, S>, Error>, element: f64) {
    let found = found.expect("it is allowed");
    assert_eq!(found.as_tagged().states(), [R::STATE, S::STATE]);
    assert_eq!(found.tensor().0, [element]);
}

#[test]
fn reductions() {
    let terms = value::<Invariant, Partial>();
    let own = value::<Invariant, Varying>();
    is(Invariant, Replicate, terms.all_reduce(OnShard, Sum), 3.0);
    is(Invariant, Replicate, terms.all_reduce(OnShard, Avg), 3.0);
    is(Invariant, Invariant, terms.all_reduce_invariant(OnShard, Sum), 3.0);
    is(Invariant, Varying, terms.reduce_scatter(OnShard, Avg), 3.0);
    is(Invariant, Replicate, own.all_reduce(OnShard, Product), 3.0);
    is(Invariant, Replicate, own.all_reduce(OnShard, Min), 3.0);
    is(Invariant, Invariant, own.all_reduce_invariant(OnShard, Max), 3.0);
    is(Invariant, Invariant, own.all_reduce_invariant(OnShard, PreMultiplied(2.0)), 6.0);
    is(Invariant, Varying, own.reduce_scatter(OnShard, Max), 3.0);
    let root = terms.reduce(OnShard, 0, Sum).map(|reduced| reduced.expect("at the root"));
    is(Invariant, Varying, root, 3.0);
    let root = own.reduce(OnShard, 0, Product).map(|reduced| reduced.expect("at the root"));
    is(Invariant, Varying, root, 3.0);
}

#[test]
fn what_travels() {
    let own = value::<Varying, Partial>();
    is(Replicate, Partial, own.all_gather(OnReplicate), 3.0);
    is(Invariant, Partial, own.all_gather_invariant(OnReplicate), 3.0);
    is(Replicate, Partial, own.broadcast(OnReplicate, 0), 3.0);
    is(Invariant, Partial, own.broadcast_invariant(OnReplicate, 0), 3.0);
    is(Varying, Partial, own.scatter(OnReplicate, 0), 3.0);
    is(Varying, Partial, own.all_to_all(OnReplicate, vec![1], vec![1]), 3.0);
    is(Varying, Partial, own.permute(OnReplicate, vec![None]), 0.0);
    is(Varying, Partial, own.scan(OnReplicate), 3.0);
    let root = own.gather(OnReplicate, 0).map(|gathered| gathered.expect("at the root"));
    is(Varying, Partial, root, 3.0);
    own.send(OnReplicate, 0).expect("given");
    is(Varying, Partial, own.receive(OnReplicate, 0), 3.0);
}

#[test]
fn conversions() {
    let copied = value::<Partial, Replicate>();
    let once = value::<Partial, Invariant>();
    let own = value::<Partial, Varying>();
    is(Partial, Varying, copied.to_varying(OnShard), 3.0);
    is(Partial, Varying, copied.slice(OnShard), 3.0);
    is(Partial, Partial, copied.only_first(OnShard), 3.0);
    is(Partial, Replicate, once.share(OnShard), 3.0);
    is(Partial, Varying, once.slice(OnShard), 3.0);
    is(Partial, Partial, own.to_partial(OnShard), 3.0);
    is(Partial, Partial, own.place(OnShard), 3.0);
}

#[test]
fn the_whole_mesh() {
    is(Replicate, Replicate, value::<Partial, Partial>().all_reduce(OnBoth, Sum), 3.0);
    is(Invariant, Invariant, value::<Varying, Varying>().all_gather_invariant(OnBoth), 3.0);
    is(Varying, Varying, value::<Replicate, Replicate>().to_varying(OnBoth), 3.0);
    is(Replicate, Replicate, value::<Invariant, Invariant>().share(OnBoth), 3.0);
}

#[test]
fn functions() {
    let tape = alone();
    let double = |row: &Row| Ok(Row(vec![2.0 * row.0[0]]));
    let first = |one: &Row, _: &Row| Ok(one.clone());
    let copied: Dist<Row, Replicate, Replicate> = tape.assume(Row(vec![3.0]));
    let own: Dist<Row, Replicate, Varying> = tape.assume(Row(vec![4.0]));
    let terms: Dist<Row, Replicate, Partial> = tape.assume(Row(vec![5.0]));
    is(Replicate, Varying, own.map(double), 8.0);
    is(Replicate, Partial, terms.map_linear(double), 10.0);
    is(Replicate, Varying, copied.zip(&own, first), 3.0);
    is(Replicate, Varying, own.zip_sum(&copied, first), 4.0);
    is(Replicate, Partial, terms.zip_sum(&terms, first), 5.0);
    is(Replicate, Partial, copied.zip_product(&terms, first), 3.0);
}

/// The cotangents of a Replicate value are terms of a sum, and those of a Partial one are the same
/// on all ranks.
#[test]
fn gradients() {
    let tape = alone();
    let loss: Dist<Row, Partial, Invariant> = tape.assume(Row(vec![1.0]));
    let gradients = loss.backward().expect("a loss");
    let of = |found: Option<_>| Ok(found.expect("the loss depends on it"));
    let one: Dist<Row, Replicate, Invariant> = tape.assume(Row(vec![3.0]));
    let other: Dist<Row, Partial, Varying> = tape.assume(Row(vec![3.0]));
    is(Partial, Invariant, of(gradients.of(&one)), 3.0);
    let of_other = gradients.of(&other).expect("the loss depends on it");
    is(Replicate, Varying, Ok(of_other), 3.0);
}

#[test]
fn a_value_shows_its_states() {
    let shown = format!("{:?}", value::<Partial, Varying>());
    assert_eq!(shown, "Dist<Partial, Varying>(Row([3.0]))");
}
