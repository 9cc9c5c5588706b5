//! Values of two tapes, tapes of gradients, and tapes that do not fit.

use hsdp_comm::{Channel, RankFailure, World, WorldOptions, launch};
use hsdp_sharding::Mesh;

use super::{Row, alone};
use crate::autograd::dist::{Dist, Invariant, Partial, Tape, Varying};
use crate::error::Error;

type Own = Dist<Row, Varying, Varying>;

fn first(one: &Row, _: &Row) -> Result<Row, Error> {
    Ok(one.clone())
}

/// Returns the error of rank 3 on a mesh of 2 x 2, where no rank issues anything.
fn told<T>(call: impl Fn(&Own) -> Result<T, Error> + Sync) -> String {
    let said = launch(4, WorldOptions::default(), |world: World| {
        let mesh = Mesh::new(2, 2).expect("a mesh");
        let value = Tape::of_mesh(&world, mesh).expect("a tape").assume(Row(vec![1.0; 2]));
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
fn values_of_two_tapes_do_not_meet() {
    let elsewhere = |value: &Own| value.tape().without_gradients().assume(value.tensor().clone());
    let hint = "these are values of two tapes: make both values on one tape; take a gradient off \
                its tape by into_tensor";
    let zip = told(|value| value.zip::<Varying, Varying>(&elsewhere(value), first));
    assert_eq!(zip, format!("zip on rank 3: {hint}"));
    let zip_sum = told(|value| value.zip_sum::<Varying, Varying>(&elsewhere(value), first));
    assert_eq!(zip_sum, format!("zip_sum on rank 3: {hint}"));
    let zip_product = told(|value| value.zip_product::<Varying, Varying>(&elsewhere(value), first));
    assert_eq!(zip_product, format!("zip_product on rank 3: {hint}"));
    // A clone is the same tape.
    let tape = alone();
    let [one, two]: [Own; 2] = [tape.clone(), tape].map(|tape| tape.assume(Row(vec![3.0])));
    assert!(one.zip_sum(&two, first).is_ok());
}

#[test]
fn gradients_go_with_each_other_and_are_not_differentiated_again() {
    let tape = alone();
    let x: Dist<Row, Invariant, Invariant> = tape.assume(Row(vec![3.0]));
    let gradient = || x.backward().expect("a loss").of(&x).expect("it is reached");
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
    let elsewhere: Dist<Row, Invariant, Invariant> = alone().assume(Row(vec![3.0]));
    assert!(elsewhere.zip(&one, first).is_err(), "the tape made next is no gradients' tape");
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

    let loss: Dist<Row, Partial, Partial> = alone().without_gradients().assume(Row(vec![1.0]));
    let error = loss.backward().map(drop).expect_err("nothing was recorded");
    assert_eq!(
        error.to_string(),
        "backward on rank 0: nothing is recorded on its tape: the tape was made without \
         gradients, or is a tape of gradients, which are not differentiated again"
    );
}
