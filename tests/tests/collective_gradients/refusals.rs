//! What does not fit is refused by the rank that sees it, with its numbers, before anything is
//! issued.

use hsdp::World;
use hsdp::collective::{Backward, Collective, Copies, Reducer};
use hsdp_comm::{Channel, Group, Tag};
use hsdp_tests::support::worlds::on_ranks;

use Copies::Replicate;

/// Has both ranks of a world of two make a call that is refused, and gives what rank 1 is told.
fn refused<T>(call: impl Fn(&Group) -> Result<T, hsdp::Error> + Sync) -> String {
    let said = on_ranks(2, |world: World| {
        let group = world.world_group(Channel::User);
        let before = world.ledger();
        let error = call(&group).map(drop).expect_err("it is refused");
        assert_eq!(world.ledger(), before, "{error}: nothing is issued");
        assert!(matches!(error, hsdp::Error::Collective { .. }), "{error:?}");
        assert!(!error.is_fatal(), "{error}");
        Ok(error.to_string())
    });
    assert_eq!(said[0].replace("on rank 0", "on rank 1"), said[1]);
    said[1].clone()
}

fn refused_forward(collective: &Collective, len: usize) -> String {
    refused(|group| collective.forward(group, Tag::default(), vec![1.0; len]))
}

#[test]
fn roots_and_partners_that_are_no_members() {
    let reducer = Reducer::Sum;
    let output = Replicate;
    let rows = [
        (Collective::Broadcast { root: 2, output }, "broadcast", "the root"),
        (Collective::Reduce { root: 2, reducer }, "reduce", "the root"),
        (Collective::Gather { root: 2 }, "gather", "the root"),
        (Collective::Scatter { root: 2 }, "scatter", "the root"),
        (Collective::Send { to: 2 }, "send", "the destination"),
        (Collective::Receive { from: 2 }, "recv", "the source"),
    ];
    for (collective, operation, what) in rows {
        let expected =
            format!("{operation} on rank 1: {what} is member 2, but the group has 2 members");
        assert_eq!(refused_forward(&collective, 4), expected);
    }
}

#[test]
fn inputs_that_members_cannot_share() {
    let rows = [
        (Collective::ReduceScatter { reducer: Reducer::Max }, "reduce_scatter"),
        (Collective::Scatter { root: 0 }, "scatter"),
        (Collective::Slice { input: Copies::Invariant }, "slice"),
    ];
    for (collective, operation) in rows {
        let expected = format!(
            "{operation} on rank 1: the input has 5 elements, which 2 members cannot share evenly"
        );
        assert_eq!(refused_forward(&collective, 5), expected);
    }
}

#[test]
fn factors_that_are_not_finite() {
    for (factor, said) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (f64::NEG_INFINITY, "-inf")] {
        let reducer = Reducer::PreMultiplied(factor);
        for (collective, operation) in [
            (Collective::AllReduce { reducer, output: Replicate }, "all_reduce"),
            (Collective::ReduceScatter { reducer }, "reduce_scatter"),
            (Collective::Reduce { root: 0, reducer }, "reduce"),
        ] {
            let expected = format!("{operation} on rank 1: the factor {said} is not finite");
            assert_eq!(refused_forward(&collective, 4), expected);
        }
    }
}

#[test]
fn counts_that_do_not_fit() {
    let of = |send: &[usize], receive: &[usize]| Collective::AllToAll {
        send: send.to_vec(),
        receive: receive.to_vec(),
    };
    let rows = [
        (of(&[4], &[2, 2]), "it has 1 counts to send and 2 to receive, for 2 members"),
        (of(&[2, 2], &[1, 1, 2]), "it has 2 counts to send and 3 to receive, for 2 members"),
        (of(&[1, 2], &[2, 2]), "the input has 4 elements, the counts to send are [1, 2]"),
        (
            of(&[usize::MAX, 5], &[2, 2]),
            "the input has 4 elements, the counts to send are [18446744073709551615, 5]",
        ),
    ];
    for (collective, what) in rows {
        assert_eq!(refused_forward(&collective, 4), format!("all_to_all on rank 1: {what}"));
    }
    let said = on_ranks(2, |world| {
        let group = world.world_group(Channel::User);
        let before = world.ledger();
        let receive = [vec![2, 2], vec![2, 3]][group.index()].clone();
        let collective = Collective::AllToAll { send: vec![1, 3], receive };
        let refused = (group.index() == 0)
            .then(|| collective.forward(&group, Tag::default(), vec![1.0; 4]).map(drop));
        assert_eq!(world.ledger(), before, "nothing is issued");
        Ok(refused.map(|refused| refused.expect_err("it is refused").to_string()))
    });
    let expected =
        "all_to_all on rank 0: this member sends 1 elements to itself and expects 2 from itself";
    assert_eq!(said[0].as_deref(), Some(expected));
}

#[test]
fn destinations_that_do_not_fit() {
    let rows = [
        (vec![None], "it has 1 destinations for 2 members"),
        (vec![None, Some(2)], "a destination is member 2, but the group has 2 members"),
        (vec![Some(1), Some(1)], "members 0 and 1 both send to member 1"),
    ];
    for (destinations, what) in rows {
        let collective = Collective::Permute { destinations };
        assert_eq!(refused_forward(&collective, 4), format!("permute on rank 1: {what}"));
    }
}

/// Cotangents of another length than the output, of an output that is not there, and none of one
/// that is.
#[test]
fn cotangents_that_do_not_fit() {
    let reducer = Reducer::Sum;
    let output = Replicate;
    let rows = [
        (Collective::AllReduce { reducer, output }, Some(5), 4),
        (Collective::AllReduce { reducer, output }, None, 4),
        (Collective::AllReduce { reducer: Reducer::Max, output }, Some(3), 4),
        (Collective::AllReduce { reducer: Reducer::Product, output }, Some(0), 4),
        (Collective::ReduceScatter { reducer }, Some(4), 2),
        (Collective::AllGather { output }, Some(4), 8),
        (Collective::AllGather { output: Copies::Invariant }, Some(4), 8),
        (Collective::Broadcast { root: 0, output }, Some(8), 4),
        (Collective::Scatter { root: 0 }, Some(4), 2),
        (Collective::AllToAll { send: vec![2; 2], receive: vec![2; 2] }, Some(2), 4),
        (Collective::Permute { destinations: vec![Some(1), None] }, None, 4),
        (Collective::Scan, Some(3), 4),
        (Collective::Share, None, 4),
        (Collective::Slice { input: Replicate }, Some(4), 2),
        (Collective::Slice { input: Copies::Invariant }, Some(4), 2),
        (Collective::Place, Some(4), 8),
        (Collective::OnlyFirst, Some(5), 4),
    ];
    for (collective, brought, output) in rows {
        assert_eq!(refused_backward(&collective, brought), said(&collective, brought, output));
    }
}

fn said(collective: &Collective, brought: Option<usize>, output: usize) -> String {
    let what = brought.map_or_else(
        || format!("there is no cotangent of the output of {output} elements"),
        |brought| format!("the cotangent has {brought} elements, the output has {output}"),
    );
    format!("{collective} on rank 1: {what}")
}

/// The forward of 4 elements succeeds, and the backward of a cotangent of so many is refused.
fn refused_backward(collective: &Collective, brought: Option<usize>) -> String {
    let said = on_ranks(2, |world: World| {
        let group = world.world_group(Channel::User);
        let (_, backward) = collective.forward(&group, Tag::default(), vec![1.0; 4])?;
        Ok(refused_gradient(&world, &backward, brought))
    });
    assert_eq!(said[0].replace("on rank 0", "on rank 1"), said[1]);
    said[1].clone()
}

fn refused_gradient(world: &World, backward: &Backward<f64>, brought: Option<usize>) -> String {
    let before = world.ledger();
    let refused = backward.gradient(brought.map(|len| vec![1.0; len]));
    let error = refused.expect_err("it is refused");
    assert_eq!(world.ledger(), before, "{error}: nothing is issued");
    error.to_string()
}

/// Ranks without an output have no cotangent, and the root has one.
#[test]
fn cotangents_of_an_output_that_only_the_root_has() {
    let reducers = [Reducer::Sum, Reducer::Max, Reducer::Product];
    let reduces = reducers.map(|reducer| Collective::Reduce { root: 0, reducer });
    for collective in reduces.into_iter().chain([Collective::Gather { root: 0 }]) {
        let said = on_ranks(2, |world: World| {
            let group = world.world_group(Channel::User);
            let (_, backward) = collective.forward(&group, Tag::default(), vec![1.0; 4])?;
            let brought = (group.index() == 1).then_some(4);
            Ok(refused_gradient(&world, &backward, brought))
        });
        let name = collective.name();
        let len = if name == "gather" { 8 } else { 4 };
        let root =
            format!("{name} on rank 0: there is no cotangent of the output of {len} elements");
        let other = format!(
            "{name} on rank 1: there is a cotangent of 4 elements, but no output on this rank"
        );
        assert_eq!(said, [root, other]);
    }
}

/// A send has no output at all.
#[test]
fn the_cotangent_of_what_was_sent() {
    let said = on_ranks(2, |world: World| {
        let group = world.world_group(Channel::User);
        let other = 1 - group.index();
        let (_, sent) =
            Collective::Send { to: other }.forward(&group, Tag::default(), vec![1.0; 4])?;
        let (_, received) =
            Collective::Receive { from: other }.forward(&group, Tag::default(), vec![0.0; 4])?;
        let of_sent = refused_gradient(&world, &sent, Some(4));
        Ok([of_sent, refused_gradient(&world, &received, None)])
    });
    assert_eq!(
        said[1],
        [
            "send on rank 1: there is a cotangent of 4 elements, but no output on this rank",
            "recv on rank 1: there is no cotangent of the output of 4 elements",
        ]
    );
}
