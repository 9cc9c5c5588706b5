//! Ranks that wait for each other in different operations: found long before the deadline, and never by mistake.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::WorldError::{Aborted, Mismatch};
use hsdp_comm::{Channel, Error, Pending, Reduction, Stage, Tag, Wanted, World, WorldOptions};
use hsdp_sharding::Rank;

use crate::common::outcomes;

/// The grace of 200 ms, twice, and what a busy machine adds. The deadline is 120 s.
const PROMPTLY: Duration = Duration::from_secs(2);

fn settled<T>(issued: Result<Pending<T>, Error>) -> Result<T, Error> {
    issued?.wait()
}

fn user(world: &World) -> Result<Pending<()>, Error> {
    world.world_group(Channel::User).barrier(Tag::default().step(7))
}

fn control(world: &World) -> Result<Pending<Vec<u64>>, Error> {
    world.world_group(Channel::Control).all_gather(Tag::new(Stage::Header).step(8), vec![1; 8])
}

const USER: &str = "barrier, user, step 7, microbatch 0 (operation 0 on channel user, epoch 0)";
const CONTROL: &str = "all_gather u64 8 elements, header, step 8, microbatch 0 (operation 0 on channel control, epoch 0)";

/// Runs `size` ranks that end in a circle, promptly, and gives the lines of the table that all get.
fn circle(size: usize, rank: impl Fn(&World) -> Result<(), Error> + Sync) -> Vec<String> {
    let started = Instant::now();
    let ends = outcomes(size, WorldOptions::default(), |world| {
        let end = rank(&world).expect_err("none of them goes on");
        assert_eq!(world.end().as_ref(), Some(&end));
        end
    });
    assert!(started.elapsed() < PROMPTLY);
    let ends: Vec<Error> = ends.into_iter().map(|end| end.expect("no panic")).collect();
    assert!(ends.iter().all(|end| *end == ends[0]), "all ranks get one table: {ends:?}");
    let Error::World(Mismatch(table)) = &ends[0] else { panic!("{}", ends[0]) };
    assert!(table.rows.iter().all(|row| matches!(row.wanted, Wanted::Waiting { .. })));
    assert!(ends[0].is_fatal());
    table.to_string().lines().map(|line| line.trim().to_owned()).collect()
}

const PROBLEM: &str = "ranks wait for each other in different operations:";

#[test]
fn two_ranks() {
    let table = circle(2, |world| match world.rank().index() {
        0 => settled(user(world)),
        _ => settled(control(world)).map(drop),
    });
    let rows = [
        PROBLEM.to_owned(),
        format!("rank 0: waits for ranks [1] in {USER}"),
        format!("rank 1: waits for ranks [0] in {CONTROL}"),
    ];
    assert_eq!(table, rows);
}

#[test]
fn three_ranks() {
    let table = circle(3, |world| match world.rank().index() {
        1 => settled(control(world)).map(drop),
        _ => settled(user(world)),
    });
    let rows = [
        PROBLEM.to_owned(),
        format!("rank 0: waits for ranks [1] in {USER}"),
        format!("rank 1: waits for ranks [0, 2] in {CONTROL}"),
        format!("rank 2: waits for ranks [1] in {USER}"),
    ];
    assert_eq!(table, rows);
}

#[test]
fn pairs_around_a_ring() {
    // Each waits for the one before it, in a group of two.
    let table = circle(3, |world| {
        let rank = world.rank().index();
        let pair = world.group(&[rank, (rank + 2) % 3].map(Rank::new), Channel::User)?;
        settled(pair.barrier(Tag::default().step(rank as u64)))
    });
    assert_eq!(table.len(), 4);
    for (rank, missing) in [(0, 2), (1, 0), (2, 1)] {
        let row = &table[rank + 1];
        let start =
            format!("rank {rank}: waits for ranks [{missing}] in barrier, user, step {rank}");
        assert!(row.starts_with(&start), "{row}");
    }
}

#[test]
fn a_rank_that_waits_for_a_circle_is_listed_where_it_finds_it() {
    // Rank 2 waits for rank 0, and nobody for rank 2.
    let gate = Barrier::new(3);
    let ends = outcomes(3, WorldOptions::default(), |world| {
        let rank = world.rank().index();
        let pairs = |other, channel| world.group(&[0, other].map(Rank::new), channel);
        gate.wait();
        match rank {
            0 => settled(pairs(1, Channel::User)?.barrier(Tag::default())),
            1 => settled(pairs(1, Channel::Control)?.barrier(Tag::default())),
            _ => settled(pairs(2, Channel::User)?.barrier(Tag::default())),
        }
    });
    for end in ends {
        let end = end.expect("no panic").expect_err("none of them goes on").to_string();
        for row in ["rank 0: waits for ranks [1] in", "rank 1: waits for ranks [0] in"] {
            assert!(end.contains(row), "{end}");
        }
    }
}

#[test]
fn a_rank_that_waits_for_itself() {
    let table = circle(1, |world| {
        settled(world.world_group(Channel::User).send(Tag::default(), 0, vec![1_f32]))
    });
    let row = "rank 0: waits for ranks [0] in send f32 1 element to rank 0, user, step 0, microbatch 0 \
               (operation 0 on channel user, epoch 0)";
    assert_eq!(table, [PROBLEM, row]);
}

/// Waits that are longer than several graces, and no circle.
const LONG: Duration = Duration::from_millis(400);

fn short_grace() -> WorldOptions {
    WorldOptions { circle_grace: Duration::from_millis(20), ..WorldOptions::default() }
}

fn compute(time: Duration) {
    let started = Instant::now();
    while started.elapsed() < time {
        thread::yield_now();
    }
}

#[test]
fn a_late_rank_is_not_reported() {
    let ends = outcomes(3, short_grace(), |world| {
        if world.rank().index() == 1 {
            compute(LONG);
            // It waits for one of the others while these wait for it: not a circle, since it has issued both.
            let user = user(&world)?;
            settled(control(&world))?;
            return user.wait();
        }
        let control = control(&world)?;
        settled(user(&world))?;
        control.wait().map(drop)
    });
    assert_eq!(ends, vec![Ok(Ok(())); 3]);
}

#[test]
fn a_rank_whose_other_thread_issues_later_is_not_reported() {
    let ends = outcomes(2, short_grace(), |world| {
        if world.rank().index() == 1 {
            settled(user(&world))?;
            settled(control(&world))?;
            return settled(user(&world));
        }
        // Two threads: both have issued before the one computes while the other waits.
        let group = world.world_group(Channel::Control);
        let computed = Barrier::new(2);
        settled(user(&world))?;
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                let alone = world.group(&[Rank::new(0)], Channel::Reduce)?;
                settled(alone.all_reduce(Tag::default(), Reduction::Sum, vec![1_f32]))?;
                computed.wait();
                compute(LONG);
                settled(group.all_gather(Tag::new(Stage::Header).step(8), vec![1_u64; 8]))
            });
            computed.wait();
            let waited = settled(user(&world));
            other.join().expect("no panic").and(waited)
        })
    });
    assert_eq!(ends, vec![Ok(Ok(())); 2]);
}

#[test]
fn a_rank_that_has_another_thread_wait_is_not_reported() {
    // The thread that issues computes; another waits for what it has issued.
    let ends = outcomes(2, short_grace(), |world| {
        if world.rank().index() == 1 {
            settled(control(&world))?;
            return settled(user(&world));
        }
        let pending = user(&world)?;
        thread::scope(|scope| {
            let waits = scope.spawn(|| pending.wait());
            compute(LONG);
            settled(control(&world))?;
            waits.join().expect("no panic")
        })
    });
    assert_eq!(ends, vec![Ok(Ok(())); 2]);
}

#[test]
fn ranks_that_wait_in_different_orders_are_never_reported_however_often_they_look() {
    let options = WorldOptions { circle_grace: Duration::ZERO, ..WorldOptions::default() };
    let ends = outcomes(4, options, |world| {
        let rank = world.rank().index();
        let pair = world.group(&[rank & !1, rank | 1].map(Rank::new), Channel::Reduce)?;
        for round in 0..300 {
            let mut barriers = vec![
                user(&world)?,
                pair.barrier(Tag::default())?,
                world.world_group(Channel::AllReduce).barrier(Tag::default())?,
            ];
            // All have issued all, so nobody is stuck, whatever each waits for first, and however late it is.
            barriers.rotate_left((rank + round) % 3);
            if (rank + round) % 7 == 0 {
                compute(Duration::from_millis(3));
            }
            barriers.into_iter().try_for_each(Pending::wait)?;
        }
        Ok::<_, Error>(())
    });
    assert_eq!(ends, vec![Ok(Ok(())); 4]);
}

#[test]
fn circles_may_be_left_to_the_deadline() {
    let deadline = Duration::from_millis(300);
    let options = WorldOptions { deadline, circle_grace: Duration::MAX, ..WorldOptions::default() };
    let ends = outcomes(2, options, |world| match world.rank().index() {
        0 => settled(user(&world)),
        _ => settled(control(&world)).map(drop),
    });
    for end in ends {
        let end = end.expect("no panic").expect_err("none of them goes on");
        assert!(matches!(end, Error::World(Aborted { .. })), "{end}");
    }
}
