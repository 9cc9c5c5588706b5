//! Threads that come to a rendezvous: all get a world, or one failure.

use std::sync::Arc;
use std::time::Duration;

use hsdp_comm::SetupError::{DuplicateRank, Incomplete, WorldSize};
use hsdp_comm::{Error, Rendezvous, World, WorldOptions};
use hsdp_sharding::Rank;
use shuttle::thread;

use super::{SMALL, all_schedules, ones, options, schedules, settled, sum_of_ones, user};

/// The result of each of `ranks`, which come with the size that they were told.
fn come<const N: usize>(
    rendezvous: Rendezvous,
    ranks: [(usize, usize); N],
) -> [Result<World, Error>; N] {
    let rendezvous = Arc::new(rendezvous);
    let started = ranks.map(|(rank, told)| {
        let rendezvous = Arc::clone(&rendezvous);
        thread::spawn(move || rendezvous.join(Rank::new(rank), told))
    });
    started.map(|thread| thread.join().expect("no panic"))
}

#[test]
fn all_that_come_have_a_world() {
    schedules(|| {
        let rendezvous = Arc::new(Rendezvous::new(3, options(0)));
        let started = [2, 0, 1].map(|rank| {
            let rendezvous = Arc::clone(&rendezvous);
            thread::spawn(move || {
                let world = rendezvous.join(Rank::new(rank), 3)?;
                settled(ones(&user(&world), SMALL))
            })
        });
        for sum in started.map(|thread| thread.join().expect("no panic")) {
            assert_eq!(sum, Ok(sum_of_ones(3, SMALL)));
        }
    });
}

#[test]
fn one_that_was_told_another_size_is_the_end_for_all() {
    all_schedules(20_000, || {
        let outcomes = come(Rendezvous::new(3, options(0)), [(0, 3), (1, 2), (2, 3)]);
        let expected = WorldSize { rank: Rank::new(1), size: 3, told: 2 }.into();
        assert!(outcomes.iter().all(|it| it.as_ref().err() == Some(&expected)), "{outcomes:?}");
    });
}

#[test]
fn one_of_two_claimants_is_refused_and_nobody_else() {
    schedules(|| {
        let outcomes = come(Rendezvous::new(2, options(0)), [(0, 2), (1, 2), (1, 2)]);
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
        let claimants = &outcomes[1..];
        let refused =
            |it: &&Result<World, Error>| matches!(it, Err(Error::Setup(DuplicateRank { .. })));
        assert_eq!(claimants.iter().filter(refused).count(), 1, "{outcomes:?}");
        assert_eq!(claimants.iter().filter(|it| it.is_ok()).count(), 1, "{outcomes:?}");
    });
}

#[test]
fn all_that_came_in_time_have_a_world_or_none_has() {
    all_schedules(20_000, || {
        let options = WorldOptions { deadline: Duration::ZERO, ..options(0) };
        let outcomes = come(Rendezvous::new(3, options), [(0, 3), (1, 3), (2, 3)]);
        let first = outcomes[0].as_ref().err();
        assert!(outcomes.iter().all(|it| it.as_ref().err() == first), "{outcomes:?}");
        assert!(first.is_none_or(|it| matches!(it, Error::Setup(Incomplete { .. }))), "{first:?}");
    });
}
