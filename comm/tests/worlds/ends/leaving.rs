//! Ranks that leave: when their closure returns, or with their last handle.

use std::thread;
use std::time::Instant;

use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{AbortReason, Channel, Error, Reduction, World, WorldOptions};
use hsdp_sharding::Rank;

use super::{PROMPTLY, settled, sum, tag};
use crate::common::outcomes;

/// Whether the world ended because rank 0 left while others waited for it.
fn is_left_by_rank_0(end: &Error) -> bool {
    matches!(
        end,
        Error::World(Aborted { rank, reason: AbortReason::Left { .. }, .. }) if *rank == Rank::new(0)
    )
}

fn pair() -> [World; 2] {
    World::local(2, WorldOptions::default()).try_into().expect("two ranks")
}

#[test]
fn a_rank_that_returns_while_others_wait_ends_the_world() {
    let ends = outcomes(3, WorldOptions::default(), |world| {
        (world.rank().index() > 0).then(|| {
            let started = Instant::now();
            let end = sum(&world, vec![1.0]).expect_err("rank 0 leaves");
            assert!(started.elapsed() < PROMPTLY);
            end
        })
    });
    for end in ends.into_iter().skip(1) {
        let Ok(Some(end)) = end else { panic!("{end:?}") };
        assert!(is_left_by_rank_0(&end), "{end}");
    }
}

#[test]
fn a_rank_that_left_before_others_arrive_ends_the_world_when_they_do() {
    let [first, second] = pair();
    let group = first.world_group(Channel::User);
    drop(first);
    assert_eq!(second.end(), None, "its group is a handle, too");
    drop(group);
    assert_eq!(second.end(), None, "nobody waits for it yet");
    let started = Instant::now();
    let end = sum(&second, vec![1.0]).expect_err("rank 0 has left");
    assert!(started.elapsed() < PROMPTLY);
    assert!(is_left_by_rank_0(&end), "{end}");
}

#[test]
fn a_rank_that_drops_its_last_handle_while_others_wait_ends_the_world() {
    let [first, second] = pair();
    let group = second.world_group(Channel::User);
    let pending = group.all_reduce(tag(), Reduction::Sum, vec![1_f32]);
    assert!(pending.as_ref().is_ok_and(|pending| !pending.is_complete()));
    let waits = thread::spawn(|| settled(pending));
    let last = first.clone();
    drop(first);
    assert_eq!(second.end(), None, "there is another handle");
    drop(last);
    let end = waits.join().expect("no panic").expect_err("rank 0 leaves");
    assert!(is_left_by_rank_0(&end), "{end}");
    assert_eq!(second.end(), Some(end));
}

#[test]
fn a_rank_that_only_its_own_transfer_misses_may_leave() {
    // It was to send to itself, or to receive from itself, and nobody else takes part.
    for sends in [true, false] {
        let [first, second] = pair();
        let group = first.world_group(Channel::User);
        if sends {
            drop(group.send(tag(), 0, vec![1_f32]));
        } else {
            drop(group.recv::<f32>(tag(), 0, 1));
        }
        drop((group, first));
        assert_eq!(second.end(), None);
        let alone = second.group(&[Rank::new(1)], Channel::User).expect("a group");
        assert_eq!(settled(alone.all_gather(tag(), vec![7_u32])), Ok(vec![7]));
    }
}

#[test]
fn a_rank_that_nobody_waits_for_may_leave() {
    let ends = outcomes(3, WorldOptions::default(), |world| {
        if world.rank().index() == 0 {
            return Ok(vec![]);
        }
        let group = world.group(&[1, 2].map(Rank::new), Channel::User)?;
        let mut sum = vec![];
        for _ in 0..100 {
            sum = settled(group.all_reduce(tag(), Reduction::Sum, vec![1_f32]))?;
        }
        Ok::<_, Error>(sum)
    });
    assert_eq!(ends, [Ok(Ok(vec![])), Ok(Ok(vec![2.0])), Ok(Ok(vec![2.0]))]);
}

#[test]
fn what_a_rank_had_issued_before_it_left_completes() {
    let ends = outcomes(2, WorldOptions::default(), |world| {
        let group = world.world_group(Channel::User);
        let issued = group.all_gather(tag(), vec![world.rank().get()])?;
        if world.rank().index() == 0 {
            return Ok(vec![]);
        }
        issued.wait()
    });
    assert_eq!(ends[1], Ok(Ok(vec![0, 1])));
}
