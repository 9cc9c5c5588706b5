use std::collections::HashMap;

use hsdp_kernels::{Divisor, Wire};
use hsdp_sharding::{DType, Rank, UnitId};
use proptest::prelude::*;

use super::*;
use crate::{Channel, Reduction, Scaling, Stage, Tag};

pub(crate) fn base() -> Descriptor {
    Descriptor {
        group: GroupId::of(&[Rank::new(0), Rank::new(1)], Channel::Reduce),
        channel: Channel::Reduce,
        epoch: 1,
        sequence: 4,
        op: Op::ReduceScatter,
        reduction: Some(Reduction::Sum),
        dtype: Some(DType::BF16),
        counts: Counts::Each(1003),
        root: None,
        peer: None,
        scaling: Some(Scaling { pre: divisor(2.0), ..Scaling::on(Wire::BF16) }),
        tag: Tag::new(Stage::Reduce).unit(UnitId::new(3)).step(7).microbatch(1),
    }
}

fn divisor(value: f32) -> Divisor {
    Divisor::new(value).expect("a divisor")
}

fn hash_of_one(descriptor: Descriptor, signature: u64) -> RollingHash {
    Rolling::default().note(&Arc::new(descriptor), signature).hash
}

/// The word of all members, one of which has issued what `theirs` is.
fn total(all: &[Vec<(Descriptor, u64)>]) -> u128 {
    let word = |(slot, calls): (usize, &Vec<(Descriptor, u64)>)| {
        let rolling = Rolling::default();
        calls
            .iter()
            .for_each(|(call, signature)| drop(rolling.note(&Arc::new(call.clone()), *signature)));
        rolling.word([GroupMembership { group: base().group, slot, size: all.len() }])
    };
    all.iter().enumerate().map(word).fold(0, u128::wrapping_add)
}

#[test]
fn every_field_in_which_members_must_agree_changes_hash_and_word() {
    let scaling = base().scaling.expect("it has one");
    let tag = base().tag;
    let with = |scaling| Descriptor { scaling, ..base() };
    let others = [
        Descriptor { channel: Channel::Gather, ..base() },
        Descriptor { epoch: 2, ..base() },
        Descriptor { sequence: 5, ..base() },
        Descriptor { op: Op::AllReduce, ..base() },
        Descriptor { reduction: None, ..base() },
        Descriptor { reduction: Some(Reduction::Avg), ..base() },
        Descriptor { dtype: None, ..base() },
        Descriptor { dtype: Some(DType::F16), ..base() },
        Descriptor { counts: Counts::Each(1004), ..base() },
        Descriptor { counts: Counts::Splits { send: vec![], receive: vec![] }, ..base() },
        Descriptor { root: Some(Rank::new(0)), ..base() },
        Descriptor { root: Some(Rank::new(1)), ..base() },
        with(None),
        with(Some(Scaling { wire: Wire::F16, ..scaling })),
        with(Some(Scaling { pre: divisor(4.0), ..scaling })),
        with(Some(Scaling { post: divisor(2.0), ..scaling })),
        with(Some(Scaling { pre: scaling.post, post: scaling.pre, ..scaling })),
        Descriptor { tag: Tag { stage: Stage::Gather, ..tag }, ..base() },
        Descriptor { tag: Tag { unit: None, ..tag }, ..base() },
        Descriptor { tag: tag.unit(UnitId::new(0)), ..base() },
        Descriptor { tag: tag.step(8), ..base() },
        Descriptor { tag: tag.microbatch(0), ..base() },
    ];
    let mut hashes = vec![hash_of_one(base(), 9), hash_of_one(base(), 8)];
    for other in others {
        hashes.push(hash_of_one(other.clone(), 9));
        assert_ne!(total(&[vec![(base(), 9)], vec![(other.clone(), 9)]]), 0, "{other:?}");
    }
    assert_ne!(total(&[vec![(base(), 9)], vec![(base(), 8)]]), 0);
    assert_eq!(total(&[vec![(base(), 9)], vec![(base(), 9)]]), 0);
    hashes.sort_unstable();
    assert!(hashes.array_windows().all(|[one, other]| one != other), "all of them differ");
}

#[test]
fn another_group_has_another_hash() {
    let group = GroupId::of(&[Rank::new(2), Rank::new(3)], Channel::Reduce);
    assert_ne!(hash_of_one(Descriptor { group, ..base() }, 9), hash_of_one(base(), 9));
}

#[test]
fn two_ends_of_a_transfer_and_different_splits_agree() {
    let end = |op, peer| Descriptor { op, peer: Some(Rank::new(peer)), ..base() };
    assert_eq!(hash_of_one(end(Op::Send, 1), 9), hash_of_one(end(Op::Recv, 0), 9));
    let splits = |send| {
        let counts = Counts::Splits { send: vec![send], receive: vec![1] };
        hash_of_one(Descriptor { counts, ..base() }, 9)
    };
    assert_eq!(splits(1), splits(2));
}

#[test]
fn a_digest_tells_functions_layouts_and_cuts_apart() {
    let layout = |len| {
        let unit = hsdp_sharding::Unit::new("a").param(hsdp_sharding::Param::new("w", [len]));
        UnitLayout::new(&unit, 2).expect("a layout")
    };
    assert_eq!(signature(1, Some(&layout(4)), None), signature(1, Some(&layout(4)), None));
    assert_ne!(signature(1, Some(&layout(4)), None), signature(2, Some(&layout(4)), None));
    assert_ne!(signature(1, Some(&layout(4)), None), signature(1, Some(&layout(6)), None));
    assert_ne!(signature(1, None, None), signature(2, None, None));
    assert_ne!(signature(1, None, None), signature(1, None, Some(&[0, 4, 9])));
    assert_ne!(signature(1, None, Some(&[0, 5, 9])), signature(1, None, Some(&[0, 4, 9])));
}

#[test]
fn the_last_entries_are_kept_with_their_numbers() {
    let rolling = Rolling::default();
    let other = Arc::new(Descriptor { group: GroupId::from_hash(5), ..base() });
    let entries: Vec<_> = (0..KEPT as u64 + 10)
        .map(|index| {
            rolling.note(&other, 0);
            let entry = rolling.note(&Arc::new(Descriptor { sequence: index, ..base() }), 0);
            assert_eq!(entry.index, index);
            entry
        })
        .collect();
    let group = base().group;
    assert_eq!(rolling.count(group), KEPT as u64 + 10);
    assert_eq!(rolling.kept()[&group], entries[10..]);
    assert_eq!(rolling.count(GroupId::from_hash(6)), 0);
}

#[test]
fn what_is_adopted_makes_hashes_equal_again() {
    let all = Rolling::default();
    let behind = Rolling::default();
    let call = |sequence| Arc::new(Descriptor { sequence, ..base() });
    let entries: Vec<_> = (0..3).map(|sequence| all.note(&call(sequence), 7)).collect();
    behind.note(&call(0), 7);
    entries[1..].iter().for_each(|entry| behind.adopt(entry.clone()));
    let last = [&all, &behind].map(|rolling| rolling.note(&call(3), 7));
    assert_eq!(last[0], last[1]);
    let descriptors =
        behind.kept().remove(&base().group).into_iter().flatten().map(|it| it.descriptor);
    assert_eq!(descriptors.collect::<Vec<_>>(), [Some(call(0)), None, None, Some(call(3))]);
}

#[test]
fn nothing_issued_and_groups_of_one_have_the_word_0() {
    let rolling = Rolling::default();
    let group = base().group;
    assert_eq!(rolling.word([GroupMembership { group, slot: 0, size: 2 }]), 0);
    rolling.note(&Arc::new(base()), 0);
    assert_eq!(rolling.word([GroupMembership { group, slot: 0, size: 1 }]), 0);
    assert_ne!(rolling.word([GroupMembership { group, slot: 0, size: 2 }]), 0);
}

/// Groups of some sizes; calls of each; and a member of one of them that leaves out, repeats or
/// changes one of its calls.
fn groups() -> impl Strategy<Value = (Vec<(usize, usize)>, Option<Odd>)> {
    let groups = prop::collection::vec((1_usize..9, 0_usize..6), 1..6);
    let odd =
        prop::option::of((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0_u8..3));
    (groups, odd)
}

type Odd = (prop::sample::Index, prop::sample::Index, u8);

proptest! {
    #[test]
    fn the_sum_of_words_is_0_if_and_only_if_members_agree((groups, odd) in groups()) {
        let size = groups.iter().map(|(size, _)| *size).max().unwrap_or(1);
        let ranks: Vec<Rolling> = (0..size).map(|_| Rolling::default()).collect();
        let id = |group: usize| GroupId::from_hash(77 + group as u64);
        let mut memberships: HashMap<usize, Vec<GroupMembership>> = HashMap::new();
        let mut disagree = false;
        for (group, (size, calls)) in groups.iter().enumerate() {
            for (slot, rank) in ranks.iter().enumerate().take(*size) {
                let is_odd = odd.as_ref().filter(|(g, s, _)| {
                    g.index(groups.len()) == group && s.index(*size) == slot
                });
                let mut own: Vec<u64> = (0..*calls as u64).collect();
                match is_odd.map(|(_, _, how)| how) {
                    None => {}
                    Some(0) => own.push(99),
                    Some(1) => drop(own.pop()),
                    Some(_) => own.iter_mut().take(1).for_each(|sequence| *sequence += 50),
                }
                disagree |= *size > 1 && own != (0..*calls as u64).collect::<Vec<_>>();
                for sequence in own {
                    let call = Descriptor { group: id(group), sequence, ..base() };
                    rank.note(&Arc::new(call), 0);
                }
                let membership = GroupMembership { group: id(group), slot, size: *size };
                memberships.entry(slot).or_default().push(membership);
            }
        }
        let word = |(slot, rolling): (usize, &Rolling)| rolling.word(memberships[&slot].clone());
        let total = ranks.iter().enumerate().map(word).fold(0, u128::wrapping_add);
        prop_assert_eq!(total != 0, disagree);
    }
}
