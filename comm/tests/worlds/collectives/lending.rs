//! The collectives with buffers that are lent: what the others give, beside members that lend nothing.

use hsdp_comm::{Channel, Group, Lent, Op, Reduction, Tag, World, WorldOptions};
use hsdp_sharding::Rank;

use super::refusals::refusal;
use super::{Number, everywhere, settled, values};

/// A target of `len` elements that nobody wants to see again.
fn lent<T: Number>(source: Vec<T>, len: usize) -> Lent<T> {
    Lent { source, target: vec![T::number(99); len] }
}

/// Which members lend is a matter of each of them.
fn lends(rank: usize) -> bool {
    rank.is_multiple_of(2)
}

#[test]
fn all_gather_fills_what_is_lent() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        let mine = values::<T>(rank, len);
        let gathered = if lends(rank) {
            let lent = lent(mine.clone(), size * len);
            let back = settled(group.all_gather_into(Tag::default(), lent));
            assert_eq!(back.source, mine);
            back.target
        } else {
            settled(group.all_gather(Tag::default(), mine))
        };
        let expected: Vec<T> = (0..size).flat_map(|rank| values(rank, len)).collect();
        assert_eq!(gathered, expected);
    }
    all_dtypes!(check);
}

#[test]
fn reduce_scatter_fills_what_is_lent() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        let tag = Tag::default();
        let max = Reduction::Max;
        let mine = values::<T>(rank, size * len);
        let part = if lends(rank) {
            let back = settled(group.reduce_scatter_into(tag, max, lent(mine.clone(), len)));
            assert_eq!(back.source, mine);
            back.target
        } else {
            settled(group.reduce_scatter(tag, max, mine.clone()))
        };
        let whole = settled(group.all_reduce(tag, max, mine));
        assert_eq!(part, whole[rank * len..(rank + 1) * len]);
    }
    all_dtypes!(check);
}

#[test]
fn gather_fills_what_is_lent() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        let tag = Tag::default();
        let everybodys: Vec<T> = (0..size).flat_map(|rank| values(rank, len)).collect();
        for root in 0..size {
            let mine = values::<T>(rank, len);
            let is_root = rank == root;
            if !lends(rank) {
                let gathered = settled(group.gather(tag, root, mine.clone()));
                assert_eq!(gathered, is_root.then(|| everybodys.clone()));
                continue;
            }
            let room = if is_root { size * len } else { 0 };
            let back = settled(group.gather_into(tag, root, lent(mine.clone(), room)));
            assert_eq!(back.source, mine);
            assert_eq!(back.target, if is_root { &everybodys[..] } else { &[] });
        }
    }
    all_dtypes!(check);
}

#[test]
fn all_to_all_fills_what_is_lent() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        let part = |from: usize, to: usize| values::<T>(from + 2 * to, len + from + to);
        let counts: Vec<usize> = (0..size).map(|other| len + rank + other).collect();
        let given: Vec<T> = (0..size).flat_map(|to| part(rank, to)).collect();
        let tag = Tag::default();
        let got = if lends(rank) {
            let lent = lent(given.clone(), counts.iter().sum());
            let back = settled(group.all_to_all_into(tag, lent, counts.clone(), counts));
            assert_eq!(back.source, given);
            back.target
        } else {
            settled(group.all_to_all(tag, given, counts.clone(), counts))
        };
        assert_eq!(got, (0..size).flat_map(|from| part(from, rank)).collect::<Vec<T>>());
    }
    all_dtypes!(check);
}

#[test]
fn buffers_that_do_not_fit_are_refused_with_numbers() {
    let world = &World::local(4, WorldOptions::default())[3];
    let group = world.world_group(Channel::User);
    let tag = Tag::default();
    let buffers = |source, target| lent(vec![0_f32; source], target);
    assert_eq!(
        refusal(group.all_gather_into(tag, buffers(2, 7))),
        "all_gather on rank 3: the target has 7 elements, expected 8"
    );
    assert_eq!(
        refusal(group.reduce_scatter_into(tag, Reduction::Sum, buffers(8, 3))),
        "reduce_scatter on rank 3: the target has 3 elements, expected 2"
    );
    assert_eq!(
        refusal(group.gather_into(tag, 2, buffers(2, 8))),
        "gather on rank 3: the target has 8 elements, expected 0"
    );
    assert_eq!(
        refusal(group.all_to_all_into(tag, buffers(4, 5), vec![1; 4], vec![1; 4])),
        "all_to_all on rank 3: the target has 5 elements, expected 4"
    );
}

/// In the counting backend, in which all ranks are taken to be like this one.
#[test]
fn what_is_lent_to_a_world_without_peers_comes_back_filled_and_counts_as_much() {
    let counted = |calls: &dyn Fn(&Group)| {
        let world = World::counting(3, Rank::new(1)).expect("a rank of the world");
        calls(&world.world_group(Channel::User));
        Op::ALL.map(|op| world.ledger().op(Channel::User, op))
    };
    let tag = Tag::default();
    let sum = Reduction::Sum;
    let lending = counted(&|group| {
        let filled = settled(group.all_gather_into(tag, lent(vec![1_u32, 2], 6)));
        assert_eq!(filled, Lent { source: vec![1, 2], target: vec![1, 2, 1, 2, 1, 2] });
        let filled = settled(group.reduce_scatter_into(tag, sum, lent(vec![1_u32, 2, 3], 1)));
        assert_eq!(filled, Lent { source: vec![1, 2, 3], target: vec![6] });
        let filled = settled(group.gather_into(tag, 1, lent(vec![7_u32], 3)));
        assert_eq!(filled.target, [7, 7, 7]);
        let own = lent(vec![1_u32, 2, 3], 3);
        let filled = settled(group.all_to_all_into(tag, own, vec![1; 3], vec![1; 3]));
        assert_eq!((filled.source, filled.target[1]), (vec![1, 2, 3], 2));
    });
    let giving = counted(&|group| {
        settled(group.all_gather(tag, vec![1_u32, 2]));
        settled(group.reduce_scatter(tag, sum, vec![1_u32, 2, 3]));
        settled(group.gather(tag, 1, vec![7_u32]));
        settled(group.all_to_all(tag, vec![1_u32, 2, 3], vec![1; 3], vec![1; 3]));
    });
    assert_eq!(lending, giving);
    assert!(lending.iter().any(|flow| flow.bytes.get() > 0));
}
