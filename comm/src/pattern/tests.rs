//! Of every collective: what members give is what the others take, and every element of every
//! output comes from exactly the members that it should come from.

use hsdp_kernels::Wire;

use super::*;
use crate::{Channel, Counts, GroupId, Scaling, Tag};

/// Lengths that no number of members divides, that all divide, and none.
const COUNTS: [usize; 5] = [0, 1, 7, 60, 101];

fn descriptor(op: Op, counts: Counts) -> Descriptor {
    let is_combined = matches!(op, Op::ReduceScatter | Op::AllReduce | Op::Reduce);
    Descriptor {
        group: GroupId::of(&[], Channel::User),
        channel: Channel::User,
        epoch: 0,
        sequence: 0,
        op,
        reduction: is_combined.then_some(Reduction::Sum),
        dtype: Some(DType::BF16),
        counts,
        root: None,
        peer: None,
        scaling: None,
        tag: Tag::default(),
    }
}

/// Ranks that are not their slots.
fn ranks(members: usize) -> Vec<Rank> {
    (0..members).map(|slot| Rank::new(3 * slot + 1)).collect()
}

fn rooted(op: Op, count: usize, root: usize) -> Descriptor {
    Descriptor { root: Some(Rank::new(3 * root + 1)), ..descriptor(op, Counts::Each(count)) }
}

/// The patterns of all members.
fn all(descriptor: &Descriptor, members: usize) -> Vec<Pattern<'static>> {
    (0..members).map(|slot| Pattern::of(descriptor, &ranks(members), slot)).collect()
}

/// Checks a round: lengths that a member takes are those that the other gives; sources lie in what
/// the giver has, and targets in `outputs` of so many elements, each of which is written by exactly
/// `givers` members.
fn check(patterns: &[Pattern<'_>], round: u8, sources: &[usize], outputs: &[usize], givers: usize) {
    for (to, taker) in patterns.iter().enumerate() {
        let mut written = vec![0; outputs[to]];
        let mut bytes = 0;
        for (from, giver) in patterns.iter().enumerate() {
            let source = giver.gives(round, to);
            let target = taker.takes(round, from);
            assert_eq!(source.len(), target.len(), "from {from} to {to}: {giver:?}");
            assert!(source.end <= sources[from], "{source:?} of {from}: {giver:?}");
            bytes += if from == to { 0 } else { source.len() * giver.element_bytes(round) };
            target.for_each(|place| written[place] += 1);
        }
        assert_eq!(written, vec![givers; outputs[to]], "{taker:?}");
        assert_eq!(taker.received_in(round), ByteCount::of(bytes), "{taker:?}");
    }
}

/// Every group size and length.
fn each(test: impl Fn(usize, usize)) {
    (1..=6).for_each(|members| COUNTS.iter().for_each(|count| test(members, *count)));
}

fn each_root(test: impl Fn(usize, usize, usize)) {
    each(|members, count| (0..members).for_each(|root| test(members, count, root)));
}

/// `len` at the root, and nothing elsewhere.
fn at_root(members: usize, root: usize, len: usize) -> Vec<usize> {
    (0..members).map(|slot| if slot == root { len } else { 0 }).collect()
}

#[test]
fn all_gather() {
    each(|members, count| {
        let descriptor = descriptor(Op::AllGather, Counts::Each(count));
        let patterns = all(&descriptor, members);
        check(&patterns, 0, &vec![count; members], &vec![members * count; members], 1);
        assert_eq!(patterns[0].received(), ByteCount::of((members - 1) * count * 2));
    });
}

#[test]
fn all_gather_into_one_copy() {
    each(|shards, count| {
        for members in [shards, 2 * shards, 3 * shards] {
            let descriptor = descriptor(Op::AllGather, Counts::Each(count));
            let patterns = all(&descriptor, members);
            let patterns: Vec<_> = patterns.into_iter().map(|it| it.shared(shards)).collect();
            let outputs = at_root(members, 0, shards * count);
            check(&patterns, 0, &vec![count; members], &outputs, 1);
        }
    });
}

#[test]
fn broadcast() {
    each_root(|members, count, root| {
        let descriptor = rooted(Op::Broadcast, count, root);
        let patterns = all(&descriptor, members);
        check(&patterns, 0, &at_root(members, root, count), &vec![count; members], 1);
    });
}

#[test]
fn gather() {
    each_root(|members, count, root| {
        let descriptor = rooted(Op::Gather, count, root);
        let patterns = all(&descriptor, members);
        let outputs = at_root(members, root, members * count);
        check(&patterns, 0, &vec![count; members], &outputs, 1);
    });
}

#[test]
fn scatter() {
    each_root(|members, count, root| {
        let descriptor = rooted(Op::Scatter, count, root);
        let patterns = all(&descriptor, members);
        let sources = at_root(members, root, members * count);
        check(&patterns, 0, &sources, &vec![count; members], 1);
    });
}

#[test]
fn reduce() {
    each_root(|members, count, root| {
        let descriptor = rooted(Op::Reduce, count, root);
        let patterns = all(&descriptor, members);
        let outputs = at_root(members, root, count);
        check(&patterns, 0, &vec![count; members], &outputs, members);
        assert_eq!(patterns[root].combines(0), Some(Reduction::Sum));
    });
}

#[test]
fn reduce_scatter() {
    each(|members, part| {
        let descriptor = descriptor(Op::ReduceScatter, Counts::Each(members * part));
        let patterns = all(&descriptor, members);
        check(&patterns, 0, &vec![members * part; members], &vec![part; members], members);
        assert_eq!(patterns[0].combines(0), Some(Reduction::Sum));
        let parts: Vec<_> = (0..members).map(|to| patterns[0].gives(0, to)).collect();
        assert_eq!(parts, (0..members).map(|to| to * part..(to + 1) * part).collect::<Vec<_>>());
    });
}

/// Returns the starts of uneven parts (some of them empty) of so many members, and the end.
fn cuts(members: usize, most: usize) -> Vec<usize> {
    let lens: Vec<_> = (0..members).map(|slot| most * (slot % 3) + slot / 3).collect();
    starts_of(&lens)
}

#[test]
fn gathers_and_sums_of_parts_in_place() {
    each(|members, most| {
        let cuts = cuts(members, most);
        let count = cuts[members];
        let of = |op| {
            let descriptor = descriptor(op, Counts::Each(count));
            let patterns = all(&descriptor, members);
            patterns.into_iter().map(|it| it.cut(&cuts)).collect::<Vec<_>>()
        };
        let gathers = of(Op::AllGather);
        check(&gathers, 0, &vec![count; members], &vec![count; members], 1);
        for (slot, (gather, sum)) in gathers.iter().zip(of(Op::ReduceScatter)).enumerate() {
            let own = cuts[slot]..cuts[slot + 1];
            assert_eq!((gather.rounds(), sum.rounds()), (1, 1));
            assert!((0..members).all(|to| gather.gives(0, to) == own));
            assert!((0..members).all(|from| sum.takes(0, from) == own));
            assert!((0..members).all(|to| sum.gives(0, to) == (cuts[to]..cuts[to + 1])));
            assert_eq!(sum.combines(0), Some(Reduction::Sum));
            assert_eq!(gather.received(), ByteCount::of((count - own.len()) * 2));
            assert_eq!(sum.received(), ByteCount::of((members - 1) * own.len() * 2));
        }
    });
}

/// In the first round each member combines its slice of all; in the second the slices make up the
/// whole on all.
#[test]
fn all_reduce() {
    each(|members, count| {
        let plain = descriptor(Op::AllReduce, Counts::Each(count));
        let scaled = Descriptor { scaling: Some(Scaling::on(Wire::BF16)), ..plain.clone() };
        for (descriptor, finished) in [(&plain, 2), (&scaled, 4)] {
            let patterns = all(descriptor, members);
            assert_eq!(patterns[0].rounds(), 2);
            for (slot, pattern) in patterns.iter().enumerate() {
                let own = balanced(count, members, slot);
                assert!((0..members).all(|from| pattern.takes(0, from) == own));
                let of_others = count - own.len();
                let of_own = (members - 1) * own.len();
                let bytes = of_own * 2 + of_others * finished;
                assert_eq!(pattern.received(), ByteCount::of(bytes), "{pattern:?}");
            }
            let combined: Vec<_> = patterns.iter().map(|it| it.takes(0, 0)).collect();
            assert_eq!(
                combined.into_iter().flatten().collect::<Vec<_>>(),
                (0..count).collect::<Vec<_>>()
            );
            assert_eq!(patterns[0].combines(0), Some(Reduction::Sum));
            assert_eq!(patterns[0].combines(1), None);
            check(&patterns, 1, &vec![count; members], &vec![count; members], 1);
        }
    });
}

/// Also where members deal out nothing, or nothing to some.
#[test]
fn all_to_all() {
    each(|members, most| {
        let count = |from: usize, to: usize| (5 * from + 3 * to) % (most + 1);
        let sent = |from| (0..members).map(|to| count(from, to)).collect::<Vec<_>>();
        let received = |to| (0..members).map(|from| count(from, to)).collect::<Vec<_>>();
        let counts = Counts::Splits { send: sent(0), receive: received(0) };
        let descriptor = descriptor(Op::AllToAll, counts);
        let starts = |slot| (starts_of(&sent(slot)), starts_of(&received(slot)));
        let splits: Vec<_> = (0..members).map(starts).collect();
        let patterns = all(&descriptor, members).into_iter().zip(&splits);
        let patterns =
            patterns.map(|(it, (send, receive))| it.dealt(send, receive)).collect::<Vec<_>>();
        let sources: Vec<usize> = splits.iter().map(|(send, _)| send[members]).collect();
        let outputs: Vec<usize> = splits.iter().map(|(_, receive)| receive[members]).collect();
        check(&patterns, 0, &sources, &outputs, 1);
    });
}

/// Members give to the one after them, the last to nobody; or all to themselves.
#[test]
fn permute() {
    each(|members, count| {
        let descriptor = descriptor(Op::Permute, Counts::Each(count));
        let next = |slot| (slot + 1 < members).then_some(slot + 1);
        let shifted = all(&descriptor, members).into_iter().enumerate();
        let shifted = shifted.map(|(slot, it)| it.permuted(next(slot), slot.checked_sub(1)));
        let outputs: Vec<_> = (0..members).map(|slot| if slot == 0 { 0 } else { count }).collect();
        check(&shifted.collect::<Vec<_>>(), 0, &vec![count; members], &outputs, 1);
        let kept = all(&descriptor, members).into_iter().enumerate();
        let kept = kept.map(|(slot, it)| it.permuted(Some(slot), Some(slot)));
        check(&kept.collect::<Vec<_>>(), 0, &vec![count; members], &vec![count; members], 1);
        // As long as nobody knows the giver.
        let unknown = all(&descriptor, members)[0].permuted(Some(members - 1), None);
        assert_eq!(unknown.received(), ByteCount::ZERO);
        assert_eq!(unknown.gives(0, members - 1).len(), count);
    });
}

#[test]
fn transfer() {
    for count in COUNTS {
        for op in [Op::Send, Op::Recv] {
            let descriptor = descriptor(op, Counts::Each(count));
            check(&all(&descriptor, 2), 0, &[count, 0], &[0, count], 1);
        }
    }
}

#[test]
fn barrier() {
    each(|members, _| {
        let descriptor = Descriptor { dtype: None, ..descriptor(Op::Barrier, Counts::Each(0)) };
        check(&all(&descriptor, members), 0, &vec![0; members], &vec![0; members], 1);
    });
}

#[test]
fn bytes_that_no_number_counts_are_as_many_as_can_be_counted() {
    let descriptor = descriptor(Op::Recv, Counts::Each(usize::MAX));
    assert_eq!(all(&descriptor, 2)[1].received(), ByteCount::of(usize::MAX));
    let descriptor = rooted(Op::Scatter, usize::MAX, 0);
    assert_eq!(all(&descriptor, 2)[1].received(), ByteCount::of(usize::MAX));
}
