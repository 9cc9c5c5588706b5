//! permute, send and recv, barrier.

use hsdp_comm::{Channel, Group, Tag};

use super::{Number, everywhere, settled, values};
use crate::common::results;

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
        let next = (rank + 1) % size;
        let previous = (rank + size - 1) % size;
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

#[test]
fn a_barrier_is_complete_when_all_have_come() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let came = AtomicUsize::new(0);
    results(8, |world| {
        let group = world.world_group(Channel::User);
        for round in 1..=50 {
            came.fetch_add(1, Ordering::SeqCst);
            settled(group.barrier(Tag::default()));
            assert!(came.load(Ordering::SeqCst) >= 8 * round);
        }
    });
}
