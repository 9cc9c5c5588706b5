//! all_reduce, reduce_scatter, reduce.

use std::ops::Range;

use half::bf16;
use hsdp_comm::{Channel, Group, Reduction, Tag};
use hsdp_sharding::Rank;

use super::{Number, data_header, everywhere, settled};
use crate::common::results;

/// The reductions that elements of type `T` have: integers have no average.
fn reductions<T: Number>() -> impl Iterator<Item = Reduction> {
    let all = [Reduction::Sum, Reduction::Avg, Reduction::Product, Reduction::Min, Reduction::Max];
    all.into_iter().filter(|it| *it != Reduction::Avg || T::DTYPE.is_float())
}

/// The input of rank `rank` of `size` for `reduction`: numbers of which the result is exact in every dtype.
fn given(reduction: Reduction, size: usize, rank: usize, place: usize) -> usize {
    match reduction {
        // The number of members divides the sum; it is 8 at most.
        Reduction::Avg => size * data_header(rank, place),
        // Eight factors of 2 at most.
        Reduction::Product => 1 + (rank + place / 3) % 2,
        _ => data_header(rank, place),
    }
}

/// The result of `reduction` at `place`, in whole numbers.
fn combined(reduction: Reduction, size: usize, place: usize) -> usize {
    let all = (0..size).map(|rank| given(reduction, size, rank, place));
    match reduction {
        Reduction::Sum => all.sum(),
        Reduction::Avg => all.sum::<usize>() / size,
        Reduction::Product => all.product(),
        Reduction::Min => all.min().unwrap_or(0),
        Reduction::Max => all.max().unwrap_or(0),
    }
}

fn inputs<T: Number>(reduction: Reduction, size: usize, rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|place| T::number(given(reduction, size, rank, place))).collect()
}

fn outputs<T: Number>(reduction: Reduction, size: usize, places: Range<usize>) -> Vec<T> {
    places.map(|place| T::number(combined(reduction, size, place))).collect()
}

#[test]
fn all_reduce_combines_in_place() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        for reduction in reductions::<T>() {
            let mine = inputs::<T>(reduction, size, rank, len);
            let got = settled(group.all_reduce(Tag::default(), reduction, mine));
            assert_eq!(got, outputs(reduction, size, 0..len), "{reduction}");
        }
    }
    all_dtypes!(check);
}

#[test]
fn reduce_scatter_gives_each_its_part() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        for reduction in reductions::<T>() {
            let mine = inputs::<T>(reduction, size, rank, len * size);
            let got = settled(group.reduce_scatter(Tag::default(), reduction, mine));
            let part = rank * len..(rank + 1) * len;
            assert_eq!(got, outputs(reduction, size, part), "{reduction}");
        }
    }
    all_dtypes!(check);
}

#[test]
fn reduce_gives_to_the_root_alone() {
    fn check<T: Number>(group: &Group, rank: usize, size: usize, len: usize) {
        for reduction in reductions::<T>() {
            let expected = outputs::<T>(reduction, size, 0..len);
            for root in 0..size {
                let mine = inputs::<T>(reduction, size, rank, len);
                let got = settled(group.reduce(Tag::default(), root, reduction, mine));
                assert_eq!(got.as_ref(), (rank == root).then_some(&expected), "{reduction}");
            }
        }
    }
    all_dtypes!(check);
}

#[test]
fn products_are_products() {
    results(3, |world| {
        let group = world.world_group(Channel::User);
        let mine = vec![world.rank().get() + 2, u32::MAX];
        let got = settled(group.all_reduce(Tag::default(), Reduction::Product, mine));
        assert_eq!(got, [2 * 3 * 4, u32::MAX.wrapping_mul(u32::MAX).wrapping_mul(u32::MAX)]);
    });
}

#[test]
fn averages_divide_the_sum_and_round_once() {
    results(3, |world| {
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
fn sums_are_in_member_order() {
    // (1 + 1e8) - 1e8 is 0 in f32, and (1e8 - 1e8) + 1 is 1: the order shows.
    results(3, |world| {
        let mine = vec![[1.0, 1e8, -1e8][world.rank().index()]];
        let sum_over = |order: [usize; 3]| {
            let group = world.group(&order.map(Rank::new), Channel::User).expect("a group");
            settled(group.all_reduce::<f32>(Tag::default(), Reduction::Sum, mine.clone()))[0]
        };
        assert_eq!(sum_over([0, 1, 2]), 0.0);
        assert_eq!(sum_over([1, 2, 0]), 1.0);
    });
}
