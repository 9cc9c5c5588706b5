//! Ranks without data: barriers take place among the others, everything else of users is refused by name.

use std::time::{Duration, Instant};

use hsdp_comm::CallError::Absent;
use hsdp_comm::WorldError::Mismatch;
use hsdp_comm::{Channel, Error, Group, Op, Pending, Reduction, Tag, World, WorldOptions};
use hsdp_sharding::Rank;

use crate::common::outcomes;

const ABSENT: Rank = Rank::new(1);

fn tag() -> Tag {
    Tag::default()
}

fn settled<T>(issued: Result<Pending<T>, Error>) -> Result<T, Error> {
    issued?.wait()
}

fn barrier(world: &World) -> Result<(), Error> {
    settled(world.world_group(Channel::User).barrier(tag()))
}

/// Runs four ranks, who all know that rank 1 is absent; all of them return what is expected.
fn with_one_absent(rank: impl Fn(&World) -> Result<(), Error> + Sync) {
    let ends = outcomes(4, WorldOptions::default(), |world| {
        world.set_absent(&[ABSENT]);
        rank(&world)?;
        // The world goes on, and all of it: other channels are not concerned.
        world.set_absent(&[]);
        settled(world.world_group(Channel::Control).all_gather(tag(), vec![1_f32]))?;
        barrier(&world)
    });
    assert_eq!(ends, vec![Ok(Ok(())); 4]);
}

#[test]
fn a_barrier_takes_place_among_those_that_have_data() {
    with_one_absent(|world| {
        if world.rank() == ABSENT {
            return Ok(());
        }
        (0..10).try_for_each(|_| barrier(world))
    });
}

#[test]
fn a_barrier_waits_for_all_that_have_data() {
    let delay = Duration::from_millis(50);
    with_one_absent(|world| {
        let started = Instant::now();
        match world.rank().index() {
            1 => return Ok(()),
            3 => while started.elapsed() < delay {},
            _ => {}
        }
        barrier(world)?;
        assert!(started.elapsed() >= delay / 2, "rank 3 came later");
        Ok(())
    });
}

#[test]
fn a_barrier_of_those_that_have_data_never_pairs_with_one_of_their_own_group() {
    with_one_absent(|world| {
        if world.rank() == ABSENT {
            return Ok(());
        }
        let own = world.group(&[0, 2, 3].map(Rank::new), Channel::User)?;
        // Issued in another order on rank 0, which no rank waits for.
        let all = world.world_group(Channel::User);
        let barriers = if world.rank().index() == 0 {
            [all.barrier(tag().step(1)), own.barrier(tag().step(2))]
        } else {
            let own = own.barrier(tag().step(2));
            [all.barrier(tag().step(1)), own]
        };
        barriers.into_iter().try_for_each(settled)
    });
}

#[test]
fn a_barrier_that_one_rank_is_left_in_is_over_at_once() {
    let ends = outcomes(3, WorldOptions::default(), |world| {
        world.set_absent(&[0, 2].map(Rank::new));
        let before = world.ledger();
        let end = if world.rank() == Rank::new(1) { barrier(&world) } else { Ok(()) };
        assert_eq!(world.ledger(), before, "nobody took part");
        end
    });
    assert_eq!(ends, vec![Ok(Ok(())); 3]);
}

type Call = fn(&Group) -> Result<(), Error>;

/// Everything that users may call but a barrier, in a group of four.
const CALLS: [(Op, Call); 9] = [
    (Op::AllGather, |group| settled(group.all_gather(tag(), vec![1_f32])).map(drop)),
    (Op::ReduceScatter, |group| {
        settled(group.reduce_scatter(tag(), Reduction::Sum, vec![1_f32; 4])).map(drop)
    }),
    (Op::AllReduce, |group| {
        settled(group.all_reduce(tag(), Reduction::Sum, vec![1_f32])).map(drop)
    }),
    (Op::Broadcast, |group| settled(group.broadcast(tag(), 0, vec![1_f32])).map(drop)),
    (Op::Reduce, |group| settled(group.reduce(tag(), 0, Reduction::Sum, vec![1_f32])).map(drop)),
    (Op::Gather, |group| settled(group.gather(tag(), 0, vec![1_f32])).map(drop)),
    (Op::AllToAll, |group| {
        settled(group.all_to_all(tag(), vec![1_f32; 4], vec![1; 4], vec![1; 4])).map(drop)
    }),
    (Op::Permute, |group| settled(group.permute(tag(), None, vec![1_f32])).map(drop)),
    (Op::Recv, |group| settled(group.recv::<f32>(tag(), ABSENT.index(), 1)).map(drop)),
];

#[test]
fn every_other_collective_is_refused_on_those_that_call_it() {
    with_one_absent(|world| {
        let group = world.world_group(Channel::User);
        let rank = world.rank();
        let before = world.ledger();
        for (op, call) in CALLS {
            let absent = vec![ABSENT];
            assert_eq!(call(&group), Err(Absent { op, rank, absent }.into()));
        }
        assert_eq!(world.ledger(), before);
        Ok(())
    });
}

#[test]
fn an_absent_rank_is_refused_everything_of_users() {
    with_one_absent(|world| {
        if world.rank() != ABSENT {
            return Ok(());
        }
        let refused = |op| Err(Error::Call(Absent { op, rank: ABSENT, absent: vec![ABSENT] }));
        assert_eq!(barrier(world), refused(Op::Barrier));
        let alone = world.group(&[ABSENT], Channel::User)?;
        assert_eq!(settled(alone.barrier(tag())), refused(Op::Barrier));
        let text = barrier(world).expect_err("refused").to_string();
        assert_eq!(
            text,
            "barrier on rank 1: it has no data in this step (without data: ranks [1])"
        );
        Ok(())
    });
}

#[test]
fn who_has_data_reads_who_has_not() {
    let absent = [3, 0, 3].map(Rank::new);
    let worlds = World::local(4, WorldOptions::default());
    worlds[1].set_absent(&absent);
    let end = worlds[1].world_group(Channel::User).all_gather(tag(), vec![1_f32]);
    assert_eq!(
        end.map(drop).expect_err("refused").to_string(),
        "all_gather on rank 1: ranks [0, 3] have no data in this step: only a barrier can run without them"
    );
}

#[test]
fn groups_and_transfers_of_those_that_have_data_are_not_concerned() {
    with_one_absent(|world| {
        let group = world.world_group(Channel::User);
        match world.rank().index() {
            0 => settled(group.send(tag(), 2, vec![7_f32]))?,
            2 => assert_eq!(settled(group.recv::<f32>(tag(), 0, 1))?, [7.0]),
            _ => {}
        }
        if [2, 3].contains(&world.rank().index()) {
            let pair = world.group(&[2, 3].map(Rank::new), Channel::User)?;
            assert_eq!(settled(pair.all_reduce(tag(), Reduction::Sum, vec![1_f32]))?, [2.0]);
        }
        Ok(())
    });
}

#[test]
fn other_channels_are_not_concerned() {
    with_one_absent(|world| {
        for channel in Channel::ALL.into_iter().filter(|channel| *channel != Channel::User) {
            let sum = world.world_group(channel).all_reduce(tag(), Reduction::Sum, vec![1_f32]);
            assert_eq!(settled(sum)?, [4.0]);
        }
        Ok(())
    });
}

#[test]
fn ranks_that_were_told_different_things_do_not_wait_for_ever() {
    let ends = outcomes(3, WorldOptions::default(), |world| {
        let told: &[Rank] = if world.rank().index() == 0 { &[] } else { &[Rank::new(0)] };
        world.set_absent(told);
        barrier(&world)?;
        // Ranks 1 and 2 went on without rank 0, which waits for them.
        settled(world.world_group(Channel::Control).barrier(tag()))
    });
    for end in ends {
        let end = end.expect("no panic").expect_err("none of them goes on");
        assert!(matches!(end, Error::World(Mismatch(..))), "{end}");
    }
}

#[test]
fn where_ranks_are_only_counted_absence_is_the_same() {
    let world = World::counting(4, Rank::new(2)).expect("a rank");
    world.set_absent(&[ABSENT]);
    assert_eq!(barrier(&world), Ok(()));
    assert!(CALLS.iter().all(|(_, call)| {
        matches!(call(&world.world_group(Channel::User)), Err(Error::Call(Absent { .. })))
    }));
}
