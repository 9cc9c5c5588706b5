use hsdp_kernels::{Divisor, Wire};

use super::*;
use crate::Stage;

fn descriptor(op: Op) -> Descriptor {
    Descriptor {
        group: GroupId::of(&[Rank::new(0), Rank::new(1)], Channel::User),
        channel: Channel::User,
        epoch: 0,
        sequence: 4,
        op,
        reduction: None,
        dtype: Some(DType::F32),
        counts: Counts::Each(1003),
        root: None,
        peer: None,
        scaling: None,
        tag: Tag::new(Stage::User).step(7),
    }
}

#[test]
fn a_group_is_its_ranks_in_order_and_its_channel() {
    let ranks = [0, 1, 2].map(Rank::new);
    let id = GroupId::of(&ranks, Channel::User);
    assert_eq!(id, GroupId::of(&ranks, Channel::User));
    assert_ne!(id, GroupId::of(&[0, 2, 1].map(Rank::new), Channel::User));
    assert_ne!(id, GroupId::of(&ranks[..2], Channel::User));
    assert!(Channel::ALL[..4].iter().all(|channel| GroupId::of(&ranks, *channel) != id));
    assert_ne!(id.pair(ranks[0], ranks[1]), id.pair(ranks[1], ranks[0]));
}

#[test]
fn every_field_that_members_choose_is_compared() {
    let one = Divisor::ONE;
    let base = descriptor(Op::AllReduce);
    let scaling = Some(Scaling { wire: Wire::BF16, pre: one, post: one });
    let others = [
        Descriptor { op: Op::Reduce, ..base.clone() },
        Descriptor { reduction: Some(Reduction::Sum), ..base.clone() },
        Descriptor { dtype: Some(DType::BF16), ..base.clone() },
        Descriptor { counts: Counts::Each(1004), ..base.clone() },
        Descriptor { root: Some(Rank::new(1)), ..base.clone() },
        Descriptor { scaling, ..base.clone() },
        Descriptor { tag: base.tag.microbatch(1), ..base.clone() },
    ];
    assert!(base.agrees_with(&base));
    assert!(others.iter().all(|other| !base.agrees_with(other) && !other.agrees_with(&base)));
}

#[test]
fn the_two_ends_of_a_transfer_agree_though_they_do_different_things() {
    let send = Descriptor { peer: Some(Rank::new(1)), ..descriptor(Op::Send) };
    let receive = Descriptor { peer: Some(Rank::new(0)), ..descriptor(Op::Recv) };
    assert!(send.agrees_with(&receive));
    assert!(!send.agrees_with(&Descriptor { counts: Counts::Each(1), ..receive }));
}

#[test]
fn a_descriptor_is_one_line() {
    let line = descriptor(Op::Broadcast).to_string();
    assert_eq!(line, "broadcast f32 1003 elements, user, step 7, microbatch 0");
    let two = Divisor::new(2.0).expect("a divisor");
    let scaling = Some(Scaling { wire: Wire::F16, pre: two, post: Divisor::ONE });
    let reduction = Some(Reduction::Sum);
    let scaled =
        Descriptor { scaling, reduction, root: Some(Rank::new(3)), ..descriptor(Op::Reduce) };
    assert_eq!(
        scaled.to_string(),
        "reduce sum f32 1003 elements, root rank 3, wire f16, / 2 / 1, user, step 7, microbatch 0"
    );
    let counts = Counts::Splits { send: vec![1, 2], receive: vec![1, 0] };
    assert_eq!(counts.total(), 3);
    assert_eq!(
        Descriptor { counts, ..descriptor(Op::AllToAll) }.to_string(),
        "all_to_all f32 sends [1, 2] receives [1, 0] elements, user, step 7, microbatch 0"
    );
}
