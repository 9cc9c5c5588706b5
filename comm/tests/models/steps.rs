//! Steps that are given up: one end for all of an epoch, and a clean one after it.

use hsdp_comm::{Error, StepFailure, World};
use shuttle::thread;

use super::{
    LARGE, SMALL, all_schedules, assert_alike, ones, options, run, run_alone, schedules, settled,
    sum_of_ones, user,
};

fn failure(step: u64) -> StepFailure {
    StepFailure { step, reason: "the data loader broke".to_owned() }
}

/// The outcome of a step in which a rank issues sums of `len` until one ends early; and its first sum in the next.
fn give_up(world: &World, len: usize) -> (Error, Result<Vec<f32>, Error>) {
    let group = user(world);
    let end = loop {
        if let Err(end) = settled(ones(&group, len)) {
            break end;
        }
    };
    let epoch = world.epoch();
    assert_eq!(world.next_epoch(), epoch + 1);
    (end, settled(ones(&group, len)))
}

/// Rank 0 issues a sum of `len`, and gives its step up when it is there, or before.
fn abort_step(len: usize, workers: usize) {
    let worlds = World::local(2, options(workers));
    let outcomes = run(&worlds, move |world| {
        if world.rank().index() == 1 {
            return give_up(&world, len);
        }
        let pending = ones(&user(&world), len);
        world.abort_step(failure(7));
        let first = settled(pending);
        assert!(first.as_ref().map_or(true, |sum| *sum == sum_of_ones(2, len)));
        give_up(&world, len)
    });
    for (end, sum) in outcomes {
        assert!(matches!(end, Error::StepAborted { step: 7, .. }), "{end}");
        assert_eq!(sum, Ok(sum_of_ones(2, len)), "nothing of the old epoch is in it");
    }
}

#[test]
fn a_step_is_given_up_while_members_meet() {
    all_schedules(10_000, || abort_step(SMALL, 0));
}

#[test]
fn a_step_is_given_up_while_a_worker_runs_blocks() {
    schedules(|| abort_step(LARGE, 1));
}

#[test]
fn an_operation_of_a_step_that_is_given_up_ends_alike_for_all() {
    schedules(|| {
        let worlds = World::local(3, options(0));
        let outcomes = run(&worlds, |world| {
            let pending = ones(&user(&world), SMALL);
            if world.rank().index() == 0 {
                world.abort_step(failure(7));
            }
            settled(pending)
        });
        assert_alike(&outcomes, &sum_of_ones(3, SMALL));
    });
}

#[test]
fn ranks_that_give_up_at_once_name_one_of_them() {
    schedules(|| {
        let worlds = World::local(3, options(0));
        let outcomes = run(&worlds, |world| {
            if world.rank().index() > 0 {
                world.abort_step(failure(world.rank().get().into()));
            }
            give_up(&world, SMALL)
        });
        let (end, _) = &outcomes[0];
        assert!(outcomes.iter().all(|(other, _)| other == end), "{outcomes:?}");
        assert!(outcomes.iter().all(|(_, sum)| *sum == Ok(sum_of_ones(3, SMALL))), "{outcomes:?}");
    });
}

#[test]
fn the_next_step_is_given_up_before_all_have_left_the_first() {
    schedules(|| {
        let worlds = World::local(2, options(0));
        let outcomes = run(&worlds, |world| {
            if world.rank().index() == 1 {
                let [first, second] = [(); 2].map(|()| {
                    let end = settled(ones(&user(&world), SMALL)).expect_err("it was given up");
                    world.next_epoch();
                    end
                });
                return ([first, second], settled(ones(&user(&world), SMALL)));
            }
            let ends = [7, 8].map(|step| {
                world.abort_step(failure(step));
                let end = settled(ones(&user(&world), SMALL)).expect_err("it was given up");
                world.next_epoch();
                end
            });
            (ends, settled(ones(&user(&world), SMALL)))
        });
        assert_eq!(outcomes[0], outcomes[1]);
        assert_eq!(outcomes[0].1, Ok(sum_of_ones(2, SMALL)));
        assert_eq!(worlds.iter().map(World::epoch).collect::<Vec<_>>(), [2, 2]);
    });
}

/// A thread may have read the epoch before another thread of its rank goes on, and issue when all ranks have left that epoch.
#[test]
fn a_thread_that_issues_while_its_rank_goes_on_hears_of_the_end() {
    schedules(|| {
        let sums = run(&World::local(2, options(0)), |world| {
            let issuing = world.clone();
            let issuing = thread::spawn(move || settled(ones(&user(&issuing), SMALL)));
            world.abort_step(failure(7));
            world.next_epoch();
            let first = issuing.join().expect("no panic");
            first.or_else(|end| {
                assert!(matches!(end, Error::StepAborted { step: 7, .. }), "{end}");
                settled(ones(&user(&world), SMALL))
            })
        });
        assert_eq!(sums, [Ok(sum_of_ones(2, SMALL)), Ok(sum_of_ones(2, SMALL))]);
    });
}

/// A rank that is told of the end of a step leaves before the thread that announces it has come to the operation of another rank.
#[test]
fn ranks_that_leave_after_an_aborted_step_are_not_blamed_for_it() {
    all_schedules(10_000, || {
        let told = run_alone(World::local(3, options(0)), |world| {
            if world.rank().index() == 0 {
                world.abort_step(failure(7));
            }
            settled(ones(&user(&world), SMALL)).expect_err("it was given up")
        });
        for error in told {
            assert!(matches!(error, Error::StepAborted { step: 7, .. }), "{error}");
        }
    });
}

#[test]
fn a_step_is_given_up_while_the_world_is_ended() {
    schedules(|| {
        let worlds = World::local(3, options(0));
        let outcomes = run(&worlds, |world| {
            let pending = ones(&user(&world), SMALL);
            match world.rank().index() {
                0 => world.abort_step(failure(7)),
                1 => world.abort("enough"),
                _ => {}
            }
            let first = settled(pending);
            world.next_epoch();
            (first, settled(ones(&user(&world), SMALL)).expect_err("the world is over"))
        });
        let end = worlds[0].end().expect("it was ended");
        let done = outcomes.iter().filter(|(first, _)| first.is_ok()).count();
        assert!(done == 0 || done == 3, "{outcomes:?}");
        // A rank that comes when the world is over is told that, not that its step is over.
        let is_known = |it: &Error| *it == end || matches!(it, Error::StepAborted { step: 7, .. });
        for (first, second) in outcomes {
            assert!(first.err().is_none_or(|it| is_known(&it)) && is_known(&second));
        }
    });
}
