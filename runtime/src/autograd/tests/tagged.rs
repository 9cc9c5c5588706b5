//! Values whose states are known at run time: the operations that they allow, and the errors of all
//! others.

use hsdp_comm::{Channel, RankFailure, World, WorldOptions, launch};
use hsdp_sharding::Mesh;

use super::{Row, alone, collectives};
use crate::autograd::dist::AxisState::{Invariant, Partial, Replicate, Varying};
use crate::autograd::dist::{Axes, AxisState, Dist, Tagged, Tape};
use crate::autograd::operation::{Collective, Copies, Reducer};
use crate::error::Error;

const AXES: [Axes; 3] = [Axes::Replicate, Axes::Shard, Axes::Both];

fn all_states() -> impl Iterator<Item = [AxisState; 2]> {
    AxisState::ALL.into_iter().flat_map(|one| AxisState::ALL.map(|two| [one, two]))
}

fn tagged(states: [AxisState; 2]) -> Tagged<Row> {
    alone().tag(Row(vec![3.0]), states)
}

/// The error of rank 3 on a mesh of 2 x 2, where no rank issues anything.
fn told<T>(
    states: [AxisState; 2],
    call: impl Fn(&Tagged<Row>) -> Result<T, Error> + Sync,
) -> String {
    let said = launch(4, WorldOptions::default(), |world: World| {
        let mesh = Mesh::new(2, 2).expect("a mesh");
        let value = Tape::of_mesh(&world, mesh).expect("a tape").tag(Row(vec![1.0; 2]), states);
        let before = world.ledger();
        let error = call(&value).map(drop).expect_err("it is refused");
        assert!(matches!(error, Error::Collective { .. }), "{error:?}");
        assert!(!error.is_fatal(), "{error}");
        assert_eq!(world.ledger(), before, "nothing is issued");
        Ok::<_, RankFailure>(error.to_string())
    });
    said[3].clone().expect("no rank panics")
}

#[test]
fn collectives_take_the_state_that_they_say_and_no_other() {
    for collective in collectives() {
        let [from, to] = collective.states();
        for (states, axes) in all_states().flat_map(|states| AXES.map(|axes| (states, axes))) {
            let along = axes.places();
            let of_terms = !collective.is_linear() && states.contains(&Partial);
            let allowed = along.iter().all(|place| states[*place] == from) && !of_terms;
            let value = tagged(states);
            if allowed && matches!(collective, Collective::Receive { .. }) {
                let _ = value.apply(axes, &Collective::Send { to: 0 }).expect("it is given");
            }
            match value.apply(axes, &collective) {
                Ok(output) => {
                    assert!(allowed, "{collective:?} of {states:?} along {axes}");
                    let left = |place| if along.contains(&place) { to } else { states[place] };
                    let lacks = matches!(collective, Collective::Send { .. });
                    let expected = (!lacks).then(|| [left(0), left(1)]);
                    assert_eq!(output.map(|output| output.states()), expected, "{collective:?}");
                }
                Err(Error::Collective { .. }) => assert!(!allowed, "{collective:?} of {states:?}"),
                Err(other) => panic!("{collective:?} of {states:?} along {axes}: {other}"),
            }
        }
    }
}

#[test]
fn what_is_refused_is_named_with_what_to_do() {
    let sum = Collective::AllReduce { reducer: Reducer::Sum, output: Copies::Replicate };
    let max = Collective::AllReduce { reducer: Reducer::Max, output: Copies::Replicate };
    let gather = Collective::AllGather { output: Copies::Invariant };
    let rows = [
        (
            told([Partial, Varying], |value| value.apply(Axes::Shard, &sum)),
            "all_reduce on rank 3: it takes a Partial value along the shard axis, this is a \
             Varying one: a Varying value becomes Partial by to_partial, and a Replicate one by \
             only_first",
        ),
        (
            told([Partial, Varying], |value| value.apply(Axes::Both, &sum)),
            "all_reduce on rank 3: it takes a Partial value along the whole mesh, this is a \
             Varying one: a Varying value becomes Partial by to_partial, and a Replicate one by \
             only_first",
        ),
        (
            told([Partial, Varying], |value| value.apply(Axes::Replicate, &max)),
            "all_reduce on rank 3: it takes a Varying value along the replicate axis, this is a \
             Partial one: a Replicate value becomes Varying by to_varying, and an Invariant one \
             by slice; sum a Partial one first",
        ),
        (
            told([Varying, Partial], |value| value.apply(Axes::Replicate, &max)),
            "all_reduce on rank 3: this is a Partial value along the shard axis: sum a Partial \
             value first, by all_reduce or reduce_scatter",
        ),
        (
            told([Replicate, Invariant], |value| value.apply(Axes::Replicate, &gather)),
            "all_gather on rank 3: it takes a Varying value along the replicate axis, this is a \
             Replicate one: a Replicate value becomes Varying by to_varying, and an Invariant one \
             by slice; sum a Partial one first",
        ),
        (
            told([Replicate, Partial], |value| value.apply(Axes::Replicate, &Collective::Share)),
            "share on rank 3: it takes an Invariant value along the replicate axis, this is a \
             Replicate one: an Invariant value is one that all ranks hold and that counts once",
        ),
    ];
    for (said, expected) in rows {
        assert_eq!(said, expected);
    }
}

#[test]
fn functions_are_refused_by_state() {
    let same = |row: &Row| Ok(row.clone());
    let first = |one: &Row, _: &Row| Ok(one.clone());
    let other = |value: &Tagged<Row>, states| value.tape().tag(value.tensor().clone(), states);
    let rows = [
        (
            told([Varying, Partial], |value| value.map(same)),
            "map on rank 3: this is a Partial value along the shard axis: sum a Partial value \
             first, by all_reduce or reduce_scatter",
        ),
        (
            told([Invariant, Varying], |value| {
                value.zip(&other(value, [Replicate, Varying]), first)
            }),
            "zip on rank 3: these are an Invariant and a Replicate value along the replicate \
             axis: an Invariant value becomes Replicate by share; sum a Partial one first",
        ),
        (
            told([Varying, Replicate], |value| {
                value.zip_sum(&other(value, [Varying, Partial]), first)
            }),
            "zip_sum on rank 3: these are a Replicate and a Partial value along the shard axis: a \
             Replicate value is added to a Partial one as only_first, a Varying one as \
             to_partial; an Invariant one becomes Replicate by share",
        ),
        (
            told([Varying, Partial], |value| value.zip_product(value, first)),
            "zip_product on rank 3: these are a Partial and a Partial value along the shard axis: \
             an Invariant value becomes Replicate by share; sum a Partial one first",
        ),
        (
            told([Replicate, Partial], |value| value.reinterpret(Axes::Replicate, Partial)),
            "reinterpret on rank 3: a Replicate value along the replicate axis is not a Partial \
             one: only_first counts one of the copies",
        ),
        (
            told([Replicate, Partial], |value| value.reinterpret(Axes::Shard, Varying)),
            "reinterpret on rank 3: a Partial value along the shard axis is not a Varying one: \
             only a Replicate value may be taken for a Varying one, and a Varying one for a \
             Partial one",
        ),
        (
            told([Replicate, Partial], Tagged::backward),
            "backward on rank 3: this is a Replicate value along the replicate axis: each rank's \
             copy would count once more, as in pytorch issue 58005: only_first counts one copy, \
             all_reduce_invariant makes a loss that all ranks hold and that counts once",
        ),
        (
            told([Invariant, Varying], Tagged::backward),
            "backward on rank 3: this is a Varying value along the shard axis: the sum of the \
             ranks' losses is a Partial loss: to_partial",
        ),
    ];
    for (said, expected) in rows {
        assert_eq!(said, expected);
    }
}

#[test]
fn functions_leave_the_states_of_the_rules() {
    let tape = alone();
    let tag = |states| tape.tag(Row(vec![3.0]), states);
    let first = |one: &Row, _: &Row| Ok(one.clone());
    let states = |made: Result<Tagged<Row>, Error>| made.expect("it is allowed").states();
    assert_eq!(
        states(tag([Replicate, Varying]).zip(&tag([Varying, Replicate]), first)),
        [Varying; 2]
    );
    let one = tag([Partial, Replicate]);
    let two = tag([Partial, Varying]);
    assert_eq!(states(one.zip_sum(&two, first)), [Partial, Varying]);
    let one = tag([Partial, Invariant]);
    let two = tag([Replicate, Invariant]);
    assert_eq!(states(one.zip_product(&two, first)), [Partial, Invariant]);
    assert_eq!(states(one.map_linear(|row| Ok(row.clone()))), [Partial, Invariant]);
    assert_eq!(states(tag([Replicate; 2]).reinterpret(Axes::Both, Varying)), [Varying; 2]);
}

#[test]
fn values_of_two_tapes_do_not_meet() {
    let told = told([Varying; 2], |value| {
        let elsewhere = value.tape().tagged(hsdp_comm::Tag::default());
        let other = elsewhere.tag(value.tensor().clone(), [Varying; 2]);
        value.zip(&other, |one, _| Ok(one.clone()))
    });
    assert_eq!(
        told,
        "zip on rank 3: these are values of two tapes: make both values on one tape; take a \
         gradient off its tape by into_tensor"
    );
    // A clone is the same tape.
    let tape = alone();
    let [one, two] = [tape.clone(), tape].map(|tape| tape.tag(Row(vec![3.0]), [Varying; 2]));
    assert!(one.zip_sum(&two, |one, _| Ok(one.clone())).is_ok());
}

#[test]
fn gradients_have_the_states_of_cotangents() {
    let tape = alone();
    let loss = tape.tag(Row(vec![1.0]), [Partial, Invariant]);
    let gradients = loss.backward().expect("a loss");
    for states in all_states() {
        let gradient = gradients.of_tagged(&tape.tag(Row(vec![3.0]), states));
        let found = gradient.expect("the loss depends on it").states();
        let expected = states.map(|state| match state {
            Replicate => Partial,
            Partial => Replicate,
            Invariant => Invariant,
            Varying => Varying,
        });
        assert_eq!(found, expected, "of {states:?}");
    }
}

#[test]
fn gradients_go_with_each_other_and_are_not_differentiated_again() {
    let tape = alone();
    let x = tape.tag(Row(vec![3.0]), [Invariant; 2]);
    let first = |one: &Row, _: &Row| Ok(one.clone());
    let gradient = || x.backward().expect("a loss").of_tagged(&x).expect("it is reached");
    let [one, other] = [gradient(), gradient()];
    let sum = one.zip_sum(&other, first).expect("of two backwards of one tape");
    let told = sum.backward().map(drop).expect_err("a second derivative").to_string();
    assert!(
        told.ends_with("or is a tape of gradients, which are not differentiated again"),
        "{told}"
    );
    for error in [one.zip(&x, first), x.zip_product(&one, first)].map(Result::unwrap_err) {
        assert!(error.to_string().contains("values of two tapes"), "{error}");
    }
    let elsewhere = alone().tag(Row(vec![3.0]), [Invariant; 2]);
    assert!(elsewhere.zip(&one, first).is_err(), "the tape made next is no gradients' tape");
}

#[test]
fn a_value_takes_the_types_of_its_states_alone() {
    use crate::autograd::dist::{Partial as P, Varying as V};
    let meant: Result<Dist<Row, P, V>, Error> = tagged([Partial, Varying]).try_into();
    assert_eq!(meant.expect("those are its states").into_tensor(), Row(vec![3.0]));
    let said = told([Partial, Invariant], |value| Dist::<Row, P, V>::try_from(value.clone()));
    assert_eq!(
        said,
        "try_from on rank 3: the type says a Varying value along the shard axis, this is an \
         Invariant one: convert it, or name another type"
    );
}

#[test]
fn tapes_that_do_not_fit() {
    let three = Mesh::new(1, 3).expect("a mesh");
    let error = Tape::<Row>::of_mesh(&World::single(), three).expect_err("two ranks are missing");
    assert_eq!(error.to_string(), "tape on rank 0: mesh 1x3 has 3 ranks, the world has 1");

    let members = launch(2, WorldOptions::default(), |world: World| {
        Ok::<_, RankFailure>(world.world_group(Channel::User))
    });
    let member = members[1].clone().expect("no rank panics");
    let error = Tape::<Row>::of_group(&World::single(), member).expect_err("rank 1's");
    assert_eq!(error.to_string(), "tape on rank 0: the group is that of rank 1");

    let loss = alone().without_gradients().tag(Row(vec![1.0]), [Partial; 2]);
    let error = loss.backward().map(drop).expect_err("nothing was recorded");
    assert_eq!(
        error.to_string(),
        "backward on rank 0: nothing is recorded on its tape: the tape was made without \
         gradients, or is a tape of gradients, which are not differentiated again"
    );
}
