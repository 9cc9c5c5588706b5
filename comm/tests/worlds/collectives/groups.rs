//! Groups and channels are sequences of their own.

use hsdp_comm::{Channel, Reduction, Tag};
use hsdp_sharding::Rank;

use super::settled;
use crate::common::results;

#[test]
fn sub_groups_do_not_meet_each_other() {
    results(4, |world| {
        let rank = world.rank().index();
        let row = world.group(&[rank / 2 * 2, rank / 2 * 2 + 1].map(Rank::new), Channel::User);
        let column = world.group(&[rank % 2, rank % 2 + 2].map(Rank::new), Channel::User);
        let [row, column] = [row, column].map(|group| group.expect("a group"));
        for _ in 0..20 {
            let along_row = row.all_gather(Tag::default(), vec![rank as u64]);
            let along_column = column.all_gather(Tag::default(), vec![rank as u64]);
            let low = (rank / 2 * 2) as u64;
            let left = (rank % 2) as u64;
            assert_eq!(settled(along_column), [left, left + 2]);
            assert_eq!(settled(along_row), [low, low + 1]);
        }
    });
}

#[test]
fn channels_are_sequences_of_their_own() {
    results(2, |world| {
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
