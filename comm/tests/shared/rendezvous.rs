//! Threads that come by themselves: who is missing, who comes twice, and who was told something else.

use std::panic::catch_unwind;
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::SetupError::Incomplete;
use hsdp_comm::{Channel, Error, Reduction, Rendezvous, Tag, World, WorldOptions};
use hsdp_sharding::Rank;

use crate::common::outcomes;

fn rendezvous(size: usize, deadline: Duration) -> Rendezvous {
    Rendezvous::new(size, WorldOptions { deadline, ..WorldOptions::default() })
}

/// The result of each of `ranks`, which come one after the other as threads of their own.
fn come(rendezvous: &Rendezvous, ranks: &[(usize, usize)]) -> Vec<Result<World, Error>> {
    thread::scope(|scope| {
        let mut started = Vec::new();
        for (rank, told) in ranks {
            let thread = thread::Builder::new().name(format!("claims {rank}"));
            let join = move || rendezvous.join(Rank::new(*rank), *told);
            started.push(thread.spawn_scoped(scope, join).expect("a thread"));
        }
        started.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

#[test]
fn ranks_that_all_come_have_a_world() {
    let rendezvous = rendezvous(3, Duration::from_secs(30));
    let sums = thread::scope(|scope| {
        let rendezvous = &rendezvous;
        let rank = |rank| {
            scope.spawn(move || {
                let world = rendezvous.join(Rank::new(rank), 3)?;
                let mine = vec![u64::from(world.rank().get())];
                let group = world.world_group(Channel::User);
                group.all_reduce(Tag::default(), Reduction::Sum, mine)?.wait()
            })
        };
        let started = [2, 0, 1].map(rank);
        started.map(|thread| thread.join().expect("no panic"))
    });
    assert_eq!(sums, [Ok(vec![3]), Ok(vec![3]), Ok(vec![3])]);
}

#[test]
fn a_rank_that_does_not_come_is_missed_on_all_that_did() {
    let rendezvous = rendezvous(4, Duration::from_millis(200));
    let started = Instant::now();
    for outcome in come(&rendezvous, &[(0, 4), (1, 4), (3, 4)]) {
        let message = outcome.expect_err("rank 2 is missing").to_string();
        assert_eq!(message, "after 200ms ranks [2] have not joined; ranks [0, 1, 3] have");
    }
    assert!(started.elapsed() < Duration::from_secs(5));
    // A rank that comes after that is told so too, at once.
    let late = rendezvous.join(Rank::new(2), 4).expect_err("it is over");
    assert!(matches!(late, Error::Setup(Incomplete { .. })), "{late}");
}

#[test]
fn a_second_claimant_is_refused_at_once_and_both_are_named() {
    let rendezvous = rendezvous(2, Duration::from_secs(60));
    let started = Instant::now();
    thread::scope(|scope| {
        let rendezvous = &rendezvous;
        let claim = |name: &str, rank| {
            let thread = thread::Builder::new().name(name.to_owned());
            thread
                .spawn_scoped(scope, move || rendezvous.join(Rank::new(rank), 2))
                .expect("a thread")
        };
        let claims = [claim("one", 1), claim("other", 1)];
        while !claims.iter().any(thread::ScopedJoinHandle::is_finished) {
            thread::yield_now();
        }
        // The first still waits for rank 0, and gets its world.
        let zero = claim("zero", 0);
        assert!(zero.join().expect("no panic").is_ok());
        let [one, other] = claims.map(|claim| claim.join().expect("no panic"));
        let refused = if one.is_err() { &one } else { &other };
        let message = refused.as_ref().expect_err("one is refused").to_string();
        assert!(message.starts_with("rank 1 is claimed twice: by thread `o"), "{message}");
        assert!(message.contains("`one`") && message.contains("`other`"), "{message}");
        assert!(one.is_ok() || other.is_ok());
    });
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_rank_that_was_told_another_size_ends_it_for_all() {
    let rendezvous = rendezvous(3, Duration::from_secs(60));
    let started = Instant::now();
    let expected = "rank 2 joins a world of 3 ranks, but was told that it has 4";
    for outcome in come(&rendezvous, &[(0, 3), (1, 3), (2, 4)]) {
        assert_eq!(outcome.expect_err("sizes differ").to_string(), expected);
    }
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_rank_that_the_world_does_not_have_is_refused_before_anything_else() {
    let rendezvous = rendezvous(1, Duration::from_secs(60));
    let error = rendezvous.join(Rank::new(1), 1).expect_err("there is no rank 1");
    assert_eq!(
        error.to_string(),
        "rank 1 of a world of 1: ranks are numbered from 0 to the size less 1"
    );
    assert!(rendezvous.join(Rank::new(0), 1).is_ok());
}

/// Before memory is taken for them, which would abort the process.
#[test]
fn more_ranks_than_a_process_can_have_are_refused_with_their_number() {
    for size in [4097, 1 << 40, usize::MAX] {
        let expected =
            format!("a world of {size} ranks: at most 4096 may be threads of one process");
        let refused = rendezvous(size, Duration::from_secs(30)).join(Rank::new(0), size);
        assert_eq!(refused.map(drop).expect_err("no world").to_string(), expected);

        let ended = outcomes(size, WorldOptions::default(), |_| ());
        let [Err(failure)] = &ended[..] else { panic!("{ended:?}") };
        assert_eq!(failure.to_string(), format!("rank 4096: {expected}"));

        let made = catch_unwind(|| World::local(size, WorldOptions::default()));
        let panic = made.map(drop).expect_err("no world");
        assert_eq!(panic.downcast_ref::<String>(), Some(&expected));
    }
}
