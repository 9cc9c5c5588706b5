//! Worlds that end early: by request, by a rank that leaves, by a disagreement, by a deadline.

use std::time::Duration;

use hsdp_comm::CallError::Injected;
use hsdp_comm::WorldError::{Aborted, Mismatch, WorkFailed};
use hsdp_comm::{
    AbortReason, Channel, Error, Fault, FaultKind, Pending, Reduction, Tag, World, WorldOptions,
};
use hsdp_sharding::Rank;
use shuttle::thread;

use super::{
    LARGE, SMALL, all_schedules, assert_alike, is_left_by, ones, options, run, run_alone,
    schedules, settled, sum_of_ones, user,
};

/// Two members issue two operations, the second when the first is settled, and rank 1 ends the world from another thread.
fn abort(len: usize, workers: usize) {
    let worlds = World::local(2, options(workers));
    let aborts = worlds[1].clone();
    let aborts = thread::spawn(move || aborts.abort("enough"));
    let outcomes = run(&worlds, move |world| {
        let group = user(&world);
        [(); 2].map(|()| settled(ones(&group, len)))
    });
    aborts.join().expect("no panic");
    let end = worlds[0].end().expect("it was ended");
    for operation in 0..2 {
        let of_all: Vec<_> = outcomes.iter().map(|outcomes| outcomes[operation].clone()).collect();
        assert_alike(&of_all, &sum_of_ones(2, len));
        assert!(of_all[0].as_ref().err().is_none_or(|error| *error == end));
    }
    assert!(outcomes[0][0].is_ok() || outcomes[0][1].is_err(), "an end is for good");
}

#[test]
fn a_world_is_ended_while_members_meet() {
    all_schedules(10_000, || abort(SMALL, 0));
}

#[test]
fn a_world_is_ended_while_a_worker_runs_blocks() {
    schedules(|| abort(LARGE, 1));
}

#[test]
fn work_that_has_begun_completes_when_the_world_is_ended() {
    schedules(|| {
        let worlds = World::local(2, options(1));
        let issued = worlds.iter().map(|world| ones(&user(world), LARGE)).collect::<Vec<_>>();
        let aborts = worlds[1].clone();
        let aborts = thread::spawn(move || aborts.abort("too late for this one"));
        for pending in issued {
            assert_eq!(settled(pending), Ok(sum_of_ones(2, LARGE)));
        }
        aborts.join().expect("no panic");
    });
}

#[test]
fn a_world_is_ended_by_two_ranks_at_once() {
    schedules(|| {
        let worlds = World::local(3, options(0));
        let ends = run(&worlds, |world| {
            if world.rank().index() > 0 {
                world.abort(&format!("rank {} has had enough", world.rank()));
            }
            settled(ones(&user(&world), SMALL)).expect_err("no world ends without an error")
        });
        assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    });
}

#[test]
fn a_rank_leaves_while_another_comes() {
    all_schedules(10_000, || {
        let ends = run_alone(World::local(2, options(0)), |world| {
            (world.rank().index() == 1).then(|| settled(ones(&user(&world), SMALL)))
        });
        let Some(Err(end)) = &ends[1] else { panic!("{ends:?}") };
        assert!(is_left_by(0, end), "{end}");
    });
}

#[test]
fn two_ranks_leave_while_the_third_comes() {
    schedules(|| {
        let ends = run_alone(World::local(3, options(0)), |world| {
            (world.rank().index() == 1).then(|| settled(ones(&user(&world), SMALL)))
        });
        let Some(Err(end)) = &ends[1] else { panic!("{ends:?}") };
        assert!(is_left_by(0, end) || is_left_by(2, end), "{end}");
    });
}

#[test]
fn a_rank_that_has_issued_may_leave() {
    for (len, workers) in [(SMALL, 0), (LARGE, 1)] {
        schedules(move || {
            let sums = run_alone(World::local(2, options(workers)), move |world| {
                let pending = ones(&user(&world), len);
                (world.rank().index() == 1).then(|| settled(pending))
            });
            assert_eq!(sums, [None, Some(Ok(sum_of_ones(2, len)))]);
        });
    }
}

/// Three members, of which the last wants another length; what each gets.
fn disagree(worlds: &[World]) -> Vec<Error> {
    run(worlds, |world| {
        let len = if world.rank().index() == 2 { SMALL + 1 } else { SMALL };
        settled(ones(&user(&world), len)).expect_err("they do not agree")
    })
}

#[test]
fn members_that_disagree_get_one_table() {
    schedules(|| {
        let ends = disagree(&World::local(3, options(0)));
        assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
        assert!(matches!(ends[0], Error::World(Mismatch(..))), "{}", ends[0]);
    });
}

#[test]
fn members_disagree_while_the_world_is_ended() {
    schedules(|| {
        let worlds = World::local(3, options(0));
        let aborts = worlds[1].clone();
        let aborts = thread::spawn(move || aborts.abort("enough"));
        let ends = disagree(&worlds);
        aborts.join().expect("no panic");
        let end = worlds[0].end().expect("it was ended twice");
        assert!(ends.iter().all(|it| *it == end), "{ends:?}");
    });
}

/// The deadline is over when a wait begins.
pub(crate) fn impatient(workers: usize) -> WorldOptions {
    WorldOptions { deadline: Duration::ZERO, ..options(workers) }
}

#[test]
fn a_deadline_passes_while_the_others_come() {
    schedules(|| {
        let worlds = World::local(3, impatient(0));
        let outcomes = run(&worlds, |world| settled(ones(&user(&world), SMALL)));
        assert_alike(&outcomes, &sum_of_ones(3, SMALL));
    });
}

#[test]
fn a_deadline_passes_while_blocks_are_run() {
    schedules(|| {
        let worlds = World::local(2, impatient(1));
        let outcomes = run(&worlds, |world| settled(ones(&user(&world), LARGE)));
        assert_alike(&outcomes, &sum_of_ones(2, LARGE));
        if let Err(end) = &outcomes[0] {
            let Error::World(Aborted { reason, .. } | WorkFailed { reason, .. }) = end else {
                panic!("{end}")
            };
            assert!(matches!(reason, AbortReason::Deadline { .. }), "{end}");
        }
    });
}

/// A world of three in which rank 0 freezes before its first call.
fn with_a_frozen_rank() -> Vec<World> {
    let freezes = Fault::at(Rank::new(0), 0, 0, FaultKind::Freeze);
    World::local(3, WorldOptions { faults: vec![freezes], ..options(0) })
}

fn control(world: &World) -> Result<Vec<f32>, Error> {
    let control = world.world_group(Channel::Control);
    control.all_reduce(Tag::default(), Reduction::Sum, vec![1.0]).and_then(Pending::wait)
}

#[test]
fn a_rank_that_is_frozen_hears_of_the_end() {
    schedules(|| {
        let worlds = with_a_frozen_rank();
        let ends = run(&worlds, |world| {
            if world.rank().index() == 2 {
                world.abort("enough");
            }
            control(&world).expect_err("it was ended")
        });
        assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    });
}

#[test]
fn a_rank_that_is_frozen_goes_on_when_all_others_have_left() {
    schedules(|| {
        let ends = run_alone(with_a_frozen_rank(), |world| {
            (world.rank().index() == 0).then(|| control(&world))
        });
        assert!(matches!(&ends[0], Some(Err(Error::Call(Injected { .. })))), "{ends:?}");
    });
}
