//! The errors that ranks get for a step that failed: they name the rank, the step and the reason,
//! and come in time.

use std::num::NonZeroU64;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hsdp::{
    AdamW, AdamWOptions, Error, LossSum, ModelOptions, Rank, Step, StepOptions, UnitGradients,
    World, WorldOptions,
};
use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{AbortReason, Error as CommError, Fault, FaultKind, Stage, StepFailure};
use hsdp_tests::support::models::unit;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, launched, mesh, on_ranks, outcomes};

use crate::step_ends::{STEPS, attempt};

/// A rank finds its batch broken before it begins the step: it has no step to drop, and the others
/// wait for its header.
#[test]
fn a_step_that_is_given_up_before_it_begins_is_begun_again_by_all() {
    let told = on_ranks(4, |world| {
        let mut model = springs::model(world.clone(), &ModelOptions::on(mesh(2, 2)))?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        if world.rank().index() == 2 {
            let reason = "batch 17 cannot be read".to_owned();
            world.abort_step(StepFailure { step: 0, reason });
        }
        let first = attempt(&mut model, &mut adamw, None).expect_err("it is given up");
        attempt(&mut model, &mut adamw, None)?;
        Ok(first.to_string())
    });
    assert_eq!(common(told), "step 0 aborted by rank 2: batch 17 cannot be read");
}

/// After the headers, and before there is a step that could be dropped.
#[test]
fn a_rank_that_fails_while_replicas_are_compared_is_told_of_and_the_step_is_begun_again() {
    let faults = vec![Fault::at(Rank::new(2), 1, Stage::Setup, FaultKind::Error)];
    let ended = hsdp::launch(4, WorldOptions { faults, ..WorldOptions::default() }, |world| {
        let compare_replicas = NonZeroU64::new(1);
        let options = ModelOptions { compare_replicas, ..ModelOptions::on(mesh(2, 2)) };
        let mut model = springs::model(world, &options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        attempt(&mut model, &mut adamw, None)?;
        let told = attempt(&mut model, &mut adamw, None).expect_err("rank 2 fails");
        attempt(&mut model, &mut adamw, None)?;
        Ok::<_, Error>(told.to_string())
    });
    let own = "all_gather on rank 2, step 1: an injected error, in setup, step 1, microbatch 0";
    for (rank, told) in ended.into_iter().enumerate() {
        let told = told.expect("it goes on");
        let expected = format!("step 1 aborted by rank 2: {own}");
        assert_eq!(told, if rank == 2 { own } else { &expected });
    }
}

#[test]
fn the_others_are_told_why_a_step_failed() {
    let outcomes = outcomes(2, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        let elements = if rank == 1 { 92 } else { 93 };
        pass.reduce(unit(2), UnitGradients::new().with(vec![0.0_f32; elements]).without())?;
        pass.finish()?;
        step.finish().map(drop)
    });
    let messages =
        outcomes.into_iter().map(|outcome| outcome.expect_err("rank 1 is wrong").to_string());
    let wrong = "reduce of third.weight on rank 1: got 92 elements, the plan has 93";
    assert_eq!(
        messages.collect::<Vec<_>>(),
        [&format!("step 0 aborted by rank 1: {wrong}"), wrong]
    );
}

/// A rank whose own code fails in a step says why, and the next step is clean.
#[test]
fn a_step_that_is_abandoned_tells_the_others_why_and_the_next_one_begins() {
    let heard =
        heard_by_rank_1(|step: Step<'_>| step.abandon("batch 7 of shard-3.bin cannot be read"));
    assert_eq!(heard, "step 0 aborted by rank 0: batch 7 of shard-3.bin cannot be read");
}

/// The other ranks get the error that came first.
#[test]
fn an_error_of_the_step_comes_before_the_reason_that_its_owner_gives() {
    let heard = heard_by_rank_1(|mut step| {
        let mut pass = step.microbatch().expect("a microbatch");
        pass.reduce(unit(9), UnitGradients::new()).expect_err("there is no such unit");
        drop(pass);
        step.abandon("something came of it");
    });
    assert!(heard.starts_with("step 0 aborted by rank 0: reduce on rank 0, step 0: "), "{heard}");
}

#[test]
fn a_step_without_weight_is_refused_on_all_ranks_and_the_next_goes_on() {
    let norms = on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        springs::microbatch(&mut step, Batch(0..0))?;
        let refused = step.finish().expect_err("there is nothing to divide by");
        assert_eq!(
            refused.to_string(),
            "step 0: the weights of ranks 0, 1, 2, 3 add up to 0 over all microbatches"
        );
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        springs::microbatch(&mut step, Batch::of(rank, 1, 0))?;
        Ok(step.finish()?.norm().to_bits())
    });
    assert!(f64::from_bits(common(norms)) > 0.0);
}

#[test]
fn a_rank_that_panics_in_its_step_ends_the_world_of_the_others_within_a_second() {
    let panicked = OnceLock::new();
    let ended = launched(4, WorldOptions::default(), |world| {
        let rank = world.rank().index();
        let error = train_until_the_end(world, |step| {
            if rank == 2 && step == 1 {
                panicked.set(Instant::now()).expect("one rank panics, once");
                panic!("the data of rank 2 is broken");
            }
        });
        (error, Instant::now())
    });
    let panicked = panicked.get().expect("rank 2 panics");
    for (rank, ended) in ended.into_iter().enumerate() {
        match ended {
            Err(failure) => assert!(rank == 2, "rank {rank}: {failure}"),
            Ok((error, told)) => {
                let took = told.duration_since(*panicked);
                assert!(took < Duration::from_secs(1), "rank {rank} was told after {took:?}");
                named(&error.expect_err("the world is over"), rank);
            }
        }
    }
}

/// The error that rank 1 gets in the first step, which rank 0 ends. The second step takes place.
fn heard_by_rank_1(end: impl Fn(Step<'_>) + Sync) -> String {
    let heard = hsdp::launch(2, WorldOptions::default(), |world| -> Result<_, Error> {
        let rank = world.rank().index();
        let options = ModelOptions::on(mesh(1, 2));
        let mut model = springs::model(world, &options)?;
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
    let mut heard = heard.into_iter().map(|rank| rank.expect("a clean step"));
    heard.nth(1).flatten().expect("rank 1 is told")
}

/// Trains until the world ends; `after` is told the number of each step.
fn train_until_the_end(world: World, after: impl Fn(u64)) -> Result<(), Error> {
    let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
    let mut adamw = AdamW::new(&model, AdamWOptions::default());
    for _ in 0..STEPS {
        let step = model.committed_steps();
        attempt(&mut model, &mut adamw, None)?;
        after(step);
    }
    Ok(())
}

/// The end of a world names rank 2, its step, and its words.
fn named(error: &Error, rank: usize) {
    let Error::Comm(CommError::World(Aborted { rank: culprit, step, reason, .. })) = error else {
        panic!("rank {rank}: {error}");
    };
    assert_eq!((culprit.index(), *step), (2, 1), "rank {rank}: {error}");
    assert!(matches!(reason, AbortReason::Panicked { .. }), "rank {rank}: {reason}");
    assert!(error.to_string().contains("the data of rank 2 is broken"), "rank {rank}: {error}");
}
