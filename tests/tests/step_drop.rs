//! A step that is dropped while another thread of its rank waits in it.

use std::thread;
use std::time::{Duration, Instant};

use hsdp::{Error, ModelOptions, ShardedModel, Step, StepOptions, World, WorldOptions};
use hsdp_comm::{Channel, Op, Pending, StepFailure, Tag};
use hsdp_tests::support::models::{three_units, unit};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::mesh;

const DEADLINE: Duration = Duration::from_secs(60);

/// Rank 1 asks for no unit. A thread of rank 0 waits for one, inside the engine, when rank 0 drops the step: the drop
/// tells everybody at once, and the thread that waits gets the same error as rank 1.
#[test]
fn a_drop_is_announced_though_another_thread_waits_in_the_step() {
    let started = Instant::now();
    let options = WorldOptions { deadline: DEADLINE, ..WorldOptions::default() };
    let ends = hsdp::launch(2, options, |world| -> Result<String, Error> {
        let options = ModelOptions::on(mesh(1, 2));
        let mut model = ShardedModel::new(world.clone(), three_units(), options, springs::initial)?;
        let step = model.begin_step(StepOptions::microbatches(1))?;
        match world.rank().index() {
            0 => dropped_under_a_thread(step, &world),
            _ => told(&world),
        }
    });
    for end in ends {
        let end = end.expect("no panic").expect("it ends as it should");
        let expected =
            "step 0 aborted by rank 0: the step was dropped while another thread was in it";
        assert_eq!(end, expected);
    }
    assert!(started.elapsed() < DEADLINE / 2, "{:?}", started.elapsed());
}

/// A rank whose own code fails in a step says why, and the next step is clean.
#[test]
fn a_step_that_is_abandoned_tells_the_others_why_and_the_next_one_begins() {
    let heard =
        heard_by_rank_1(|step: Step<'_>| step.abandon("batch 7 of shard-3.bin cannot be read"));
    assert_eq!(heard, "step 0 aborted by rank 0: batch 7 of shard-3.bin cannot be read");
}

/// The others are told what came first.
#[test]
fn an_error_of_the_step_comes_before_the_reason_that_its_owner_gives() {
    let heard = heard_by_rank_1(|mut step| {
        let mut pass = step.microbatch().expect("a microbatch");
        pass.reduce(unit(9), Vec::new()).expect_err("there is no such unit");
        drop(pass);
        step.abandon("something came of it");
    });
    assert!(heard.starts_with("step 0 aborted by rank 0: reduce on rank 0, step 0: "), "{heard}");
}

/// A rank that does by hand what the model does for it (it announces the end of its step, and goes on to the next epoch) does
/// not end the next step, too, when it drops this one.
#[test]
fn a_step_that_was_left_behind_by_hand_is_given_up_once() {
    let epochs = hsdp::launch(2, WorldOptions::default(), |world| -> Result<_, Error> {
        let (rank, options) = (world.rank().index(), ModelOptions::on(mesh(1, 2)));
        let mut model = ShardedModel::new(world.clone(), three_units(), options, springs::initial)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        if rank == 0 {
            let reason = "a batch cannot be read".to_owned();
            world.abort_step(StepFailure { step: 0, reason });
            world.next_epoch();
            drop(step);
        } else {
            springs::microbatch(&mut step, Batch::of(rank, 0, 0)).expect_err("rank 0 is gone");
            drop(step);
        }
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        springs::microbatch(&mut step, Batch::of(rank, 0, 0))?;
        let _ = step.finish()?;
        Ok(world.epoch())
    });
    for epoch in epochs {
        assert_eq!(epoch.expect("no panic").expect("a clean step"), 1);
    }
}

/// What rank 1 hears in the first step, which rank 0 ends; the second takes place.
fn heard_by_rank_1(end: impl Fn(Step<'_>) + Sync) -> String {
    let heard = hsdp::launch(2, WorldOptions::default(), |world| -> Result<_, Error> {
        let (rank, options) = (world.rank().index(), ModelOptions::on(mesh(1, 2)));
        let mut model = ShardedModel::new(world, three_units(), options, springs::initial)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let heard = match rank {
            0 => {
                end(step);
                None
            }
            _ => {
                let passed = springs::microbatch(&mut step, Batch::of(rank, 0, 0));
                passed.and_then(|()| step.finish().map(drop)).err().map(|error| error.to_string())
            }
        };
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        springs::microbatch(&mut step, Batch::of(rank, 0, 0))?;
        step.finish().map(|_| heard)
    });
    let mut heard = heard.into_iter().map(|rank| rank.expect("no panic").expect("a clean step"));
    heard.nth(1).flatten().expect("rank 1 is told")
}

fn dropped_under_a_thread(mut step: Step<'_>, world: &World) -> Result<String, Error> {
    let handle = step.microbatch()?.handle();
    let waiting = thread::spawn(move || handle.unshard(unit(0)).map(drop));
    while world.ledger().op(Channel::Gather, Op::AllGather).calls == 0 {
        thread::yield_now();
    }
    drop(step);
    let error = waiting.join().expect("no panic").expect_err("the step is gone");
    Ok(error.to_string())
}

/// What a rank hears that waits for something else in the meantime.
fn told(world: &World) -> Result<String, Error> {
    // It may come to it when rank 0 has said so already: then it is the call that fails.
    let met = world.world_group(Channel::User).barrier(Tag::default()).and_then(Pending::wait);
    Ok(met.expect_err("rank 0 does not come").to_string())
}
