//! all_gather, broadcast, gather, scatter, all_to_all.

use hsdp_comm::{Group, Tag};

use super::{Number, everywhere, settled, values};

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
        let everybodys: Vec<T> = (0..size).flat_map(|rank| values(rank, len)).collect();
        for root in 0..size {
            let gathered = settled(group.gather(Tag::default(), root, values::<T>(rank, len)));
            assert_eq!(gathered.as_ref(), (rank == root).then_some(&everybodys));
            let back = settled(group.scatter(Tag::default(), root, gathered, len));
            assert_eq!(back, values::<T>(rank, len));
        }
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
