//! Every collective, on every dtype, with values in closed form of rank and size.

use std::fmt::Debug;

use half::{bf16, f16};
use hsdp_comm::{Channel, Error, Group, Pending, Reduction, Tag, World, world};
use hsdp_kernels::Element;
use hsdp_sharding::Rank;

/// World sizes, and lengths that no number of members divides evenly.
const SIZES: [usize; 5] = [1, 2, 3, 4, 8];
const LENGTHS: [usize; 5] = [0, 1, 7, 1003, 20_011];

/// A small whole number as an element: exact in every dtype up to 256.
trait Number: Element {
    fn number(value: usize) -> Self;
}

macro_rules! numbers {
    ($($dtype:ty: $value:ident => $element:expr;)*) => {$(
        impl Number for $dtype {
            fn number($value: usize) -> Self {
                $element
            }
        }
    )*};
}

numbers! {
    f32: value => f32::from(u16::try_from(value).expect("small"));
    f64: value => f64::from(u16::try_from(value).expect("small"));
    f16: value => f16::from_f32(f32::number(value));
    bf16: value => bf16::from_f32(f32::number(value));
    i32: value => i32::try_from(value).expect("small");
    i64: value => i64::try_from(value).expect("small");
    u32: value => u32::try_from(value).expect("small");
    u64: value => u64::try_from(value).expect("small");
}

/// What rank `rank` brings: small numbers in which rank and place both show.
fn brought(rank: usize, place: usize) -> usize {
    (3 * rank + place) % 13
}

fn values<T: Number>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|place| T::number(brought(rank, place))).collect()
}

fn settled<T>(pending: Result<Pending<T>, Error>) -> T {
    pending.and_then(Pending::wait).expect("the collective")
}

/// Runs `check` on every rank of worlds of every size, with every length.
fn everywhere(check: impl Fn(&Group, usize, usize, usize) + Sync) {
    for size in SIZES {
        world(size, |world| {
            let group = world.world_group(Channel::User);
            for len in LENGTHS {
                check(&group, world.rank().index(), size, len);
            }
        });
    }
}

/// Runs `$check::<T>` for every element type.
macro_rules! all_dtypes {
    ($check:ident) => {
        everywhere($check::<f32>);
        everywhere($check::<f64>);
        everywhere($check::<f16>);
        everywhere($check::<bf16>);
        everywhere($check::<i32>);
        everywhere($check::<i64>);
        everywhere($check::<u32>);
        everywhere($check::<u64>);
    };
}

#[test]
fn all_gather_is_everybody_in_order() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        let gathered = settled(group.all_gather(Tag::default(), values::<T>(rank, len)));
        let expected: Vec<T> = (0..size).flat_map(|rank| values(rank, len)).collect();
        assert_eq!(gathered, expected);
    }
    all_dtypes!(check);
}

#[test]
fn broadcast_is_the_roots() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        for root in 0..size {
            let got = settled(group.broadcast(Tag::default(), root, values::<T>(rank, len)));
            assert_eq!(got, values::<T>(root, len));
        }
    }
    all_dtypes!(check);
}

#[test]
fn gather_and_scatter_are_inverses_at_the_root() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        let root = size - 1;
        let gathered = settled(group.gather(Tag::default(), root, values::<T>(rank, len)));
        let expected: Vec<T> = (0..size).flat_map(|rank| values(rank, len)).collect();
        assert_eq!(gathered, (rank == root).then_some(expected));
        let back = settled(group.scatter(Tag::default(), root, gathered, len));
        assert_eq!(back, values::<T>(rank, len));
    }
    all_dtypes!(check);
}

#[test]
fn all_to_all_takes_uneven_parts() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        // From member a to member b go len + a + 2 b elements, or none if a + b is a multiple of three.
        let count = |from: usize, to: usize| {
            if (from + to).is_multiple_of(3) { 0 } else { (len % 100) + from + 2 * to }
        };
        let part = |from: usize, to: usize| -> Vec<T> {
            (0..count(from, to)).map(|place| T::number((from + 5 * to + place) % 11)).collect()
        };
        let send = (0..size).map(|to| count(rank, to)).collect();
        let receive = (0..size).map(|from| count(from, rank)).collect();
        let given: Vec<T> = (0..size).flat_map(|to| part(rank, to)).collect();
        let got = settled(group.all_to_all(Tag::default(), given, send, receive));
        assert_eq!(got, (0..size).flat_map(|from| part(from, rank)).collect::<Vec<T>>());
    }
    all_dtypes!(check);
}

#[test]
fn permute_shifts_and_fills_with_zeros() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        let shifted =
            settled(group.permute(Tag::default(), Some((rank + 1) % size), values::<T>(rank, len)));
        assert_eq!(shifted, values::<T>((rank + size - 1) % size, len));
        // The last member gives to nobody, and so the first gets nothing.
        let next = (rank + 1 < size).then_some(rank + 1);
        let moved = settled(group.permute(Tag::default(), next, values::<T>(rank, len)));
        let expected = if rank == 0 { vec![T::number(0); len] } else { values(rank - 1, len) };
        assert_eq!(moved, expected);
    }
    all_dtypes!(check);
}

#[test]
fn send_meets_recv_in_each_direction() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let tag = Tag::default();
        // Everybody sends first: a send waits for nobody until it is waited for. Two in a row keep their order.
        let first = group.send(tag, next, values::<T>(rank, len));
        let second = group.send(tag, next, values::<T>(rank + 1, len));
        assert_eq!(settled(group.recv::<T>(tag, previous, len)), values::<T>(previous, len));
        assert_eq!(settled(group.recv::<T>(tag, previous, len)), values::<T>(previous + 1, len));
        settled(first);
        settled(second);
    }
    all_dtypes!(check);
}

/// What `reduction` makes of the members' elements at `place`, in whole numbers.
fn combined(reduction: Reduction, size: usize, place: usize) -> usize {
    let all = (0..size).map(|rank| brought(rank, place));
    match reduction {
        Reduction::Sum => all.sum(),
        Reduction::Avg => all.sum::<usize>() / size,
        // Small enough factors keep products exact in every dtype.
        Reduction::Product => all.product(),
        Reduction::Min => all.min().unwrap_or(0),
        Reduction::Max => all.max().unwrap_or(0),
    }
}

const EXACT: [Reduction; 3] = [Reduction::Sum, Reduction::Min, Reduction::Max];

#[test]
fn all_reduce_combines_in_place() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        for reduction in EXACT {
            let got = settled(group.all_reduce(Tag::default(), reduction, values::<T>(rank, len)));
            let expected = (0..len).map(|place| T::number(combined(reduction, size, place)));
            assert_eq!(got, expected.collect::<Vec<T>>(), "{reduction}");
        }
    }
    all_dtypes!(check);
}

#[test]
fn reduce_scatter_gives_each_its_part() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        for reduction in EXACT {
            let given = values::<T>(rank, len * size);
            let got = settled(group.reduce_scatter(Tag::default(), reduction, given));
            let part = rank * len..(rank + 1) * len;
            let expected = part.map(|place| T::number(combined(reduction, size, place)));
            assert_eq!(got, expected.collect::<Vec<T>>(), "{reduction}");
        }
    }
    all_dtypes!(check);
}

#[test]
fn reduce_gives_to_the_root_alone() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        for (root, reduction) in (0..size).zip(EXACT) {
            let got =
                settled(group.reduce(Tag::default(), root, reduction, values::<T>(rank, len)));
            let expected = (0..len).map(|place| T::number(combined(reduction, size, place)));
            assert_eq!(got, (rank == root).then(|| expected.collect::<Vec<T>>()), "{reduction}");
        }
    }
    all_dtypes!(check);
}

#[test]
fn products_are_products() {
    world(3, |world| {
        let group = world.world_group(Channel::User);
        let mine = vec![world.rank().get() + 2, u32::MAX];
        let got = settled(group.all_reduce(Tag::default(), Reduction::Product, mine));
        assert_eq!(got, [2 * 3 * 4, u32::MAX.wrapping_mul(u32::MAX).wrapping_mul(u32::MAX)]);
    });
}

#[test]
fn averages_divide_the_sum_and_round_once() {
    world(3, |world| {
        let group = world.world_group(Channel::User);
        let mine = f32::from(u8::try_from(world.rank().index()).expect("small")) + 0.1;
        let sum = (0.1_f32 + 1.1) + 2.1;
        assert_eq!(
            settled(group.all_reduce(Tag::default(), Reduction::Avg, vec![mine])),
            [sum / 3.0]
        );
        // Each is 256 + rank: a bf16 sum would lose what f32 keeps, and the average is exact.
        let mine = vec![bf16::from_f32(256.0), bf16::from_f32(mine)];
        let got = settled(group.all_reduce(Tag::default(), Reduction::Avg, mine));
        assert_eq!(got[0], bf16::from_f32(256.0));
        let rounded = |rank: f32| bf16::from_f32(rank + 0.1).to_f32();
        assert_eq!(got[1], bf16::from_f32((rounded(0.0) + rounded(1.0) + rounded(2.0)) / 3.0));
    });
}

#[test]
fn an_average_of_integers_is_refused_before_it_is_issued() {
    world(2, |world| {
        let group = world.world_group(Channel::User);
        let refused = group.all_reduce(Tag::default(), Reduction::Avg, vec![1_u32]).map(drop);
        let expected = format!(
            "all_reduce on rank {}: u32 elements: only floating-point elements have an average",
            world.rank()
        );
        assert_eq!(refused.map_err(|error| error.to_string()), Err(expected));
        settled(group.barrier(Tag::default()));
    });
}

#[test]
fn sums_are_in_member_order() {
    // (1 + 1e8) - 1e8 is 0 in f32, and (1e8 - 1e8) + 1 is 1: the order shows.
    world(3, |world| {
        let mine = vec![[1.0, 1e8, -1e8][world.rank().index()]];
        let sum_over = |order: [usize; 3]| {
            let group = world.group(&order.map(Rank::new), Channel::User).expect("a group");
            settled(group.all_reduce::<f32>(Tag::default(), Reduction::Sum, mine.clone()))[0]
        };
        assert_eq!(sum_over([0, 1, 2]), 0.0);
        assert_eq!(sum_over([1, 2, 0]), 1.0);
    });
}

#[test]
fn sub_groups_do_not_meet_each_other() {
    world(4, |world| {
        let rank = world.rank().index();
        let row = world.group(&[rank / 2 * 2, rank / 2 * 2 + 1].map(Rank::new), Channel::User);
        let column = world.group(&[rank % 2, rank % 2 + 2].map(Rank::new), Channel::User);
        let [row, column] = [row, column].map(|group| group.expect("a group"));
        for _ in 0..20 {
            let along_row = row.all_gather(Tag::default(), vec![rank as u64]);
            let along_column = column.all_gather(Tag::default(), vec![rank as u64]);
            let (low, left) = ((rank / 2 * 2) as u64, (rank % 2) as u64);
            assert_eq!(settled(along_column), [left, left + 2]);
            assert_eq!(settled(along_row), [low, low + 1]);
        }
    });
}

#[test]
fn a_barrier_is_complete_when_all_have_come() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let came = AtomicUsize::new(0);
    world(8, |world| {
        let group = world.world_group(Channel::User);
        for round in 1..=50 {
            came.fetch_add(1, Ordering::SeqCst);
            settled(group.barrier(Tag::default()));
            assert!(came.load(Ordering::SeqCst) >= 8 * round);
        }
    });
}

#[test]
fn channels_are_sequences_of_their_own() {
    world(2, |world| {
        let [gather, reduce] = [Channel::Gather, Channel::Reduce].map(|it| world.world_group(it));
        let mine = vec![world.rank().get()];
        // The ranks issue in opposite orders: within a channel the order is the same.
        let (gathered, reduced) = if world.rank().index() == 0 {
            let gathered = gather.all_gather(Tag::default(), mine.clone());
            (gathered, reduce.all_reduce(Tag::default(), Reduction::Sum, mine))
        } else {
            let reduced = reduce.all_reduce(Tag::default(), Reduction::Sum, mine.clone());
            (gather.all_gather(Tag::default(), mine), reduced)
        };
        assert_eq!((settled(gathered), settled(reduced)), (vec![0, 1], vec![1]));
    });
}

fn refusal<T: Debug>(issued: Result<Pending<T>, Error>) -> String {
    issued.map(drop).expect_err("it is refused").to_string()
}

#[test]
fn what_one_rank_can_see_to_be_wrong_is_refused_with_numbers() {
    let world = &World::local(4, hsdp_comm::WorldOptions::default())[3];
    let group = world.world_group(Channel::User);
    let tag = Tag::default();
    assert_eq!(
        refusal(group.reduce_scatter(tag, Reduction::Sum, vec![0_f32; 1003])),
        "reduce_scatter on rank 3: the input has 1003 elements, expected a multiple of the group's 4 members"
    );
    assert_eq!(
        refusal(group.broadcast(tag, 4, vec![0_f32])),
        "broadcast on rank 3: the root is member 4, but the group has 4 members"
    );
    assert_eq!(
        refusal(group.scatter(tag, 3, Some(vec![0_f32; 7]), 2)),
        "scatter on rank 3: the input has 7 elements, expected 8: 2 for each of 4 members"
    );
    assert_eq!(
        refusal(group.all_to_all(tag, vec![0_f32; 4], vec![1; 4], vec![1, 1, 1, 2])),
        "all_to_all on rank 3: what it expects from itself has 2 elements, expected 1: what it sends to itself"
    );
}

#[test]
fn groups_that_cannot_be_are_refused() {
    let world = &World::local(3, hsdp_comm::WorldOptions::default())[1];
    let refused = |ranks: &[usize]| {
        let ranks: Vec<Rank> = ranks.iter().copied().map(Rank::new).collect();
        world.group(&ranks, Channel::User).expect_err("it is refused").to_string()
    };
    assert_eq!(refused(&[0, 2]), "group [0, 2] on rank 1 of 3: this rank is not among its members");
    assert_eq!(refused(&[1, 1]), "group [1, 1] on rank 1 of 3: a member is listed twice");
    assert_eq!(refused(&[1, 3]), "group [1, 3] on rank 1 of 3: a member is not in the world");
    assert_eq!(refused(&[]), "group [] on rank 1 of 3: this rank is not among its members");
}
