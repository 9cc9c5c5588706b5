//! The ways in which a step ends early: given up by a rank, refused by all ranks alike, or with its world.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hsdp::{
    Accumulation, AdamW, AdamWOptions, Error, LossSum, ModelOptions, ModelSpec, Optimizer, Rank,
    ShardedModel, StepOptions, World, WorldOptions,
};
use hsdp_comm::{AbortReason, Fault, FaultKind, Stage, StepFailure};
use hsdp_tests::support::handmade::{Until, lend};
use hsdp_tests::support::models::{layer, three_units, unit};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, mesh, on_ranks, outcomes};

const STEPS: u64 = 4;
const MICROBATCHES: usize = 2;
/// One attempt at each step, another for each rank that may give one up, and no end of them in no case.
const ATTEMPTS: u64 = STEPS + 4;

/// Where in its first attempt at step 1 a rank gives up: in this microbatch, that far.
#[derive(Clone, Copy, Debug)]
struct Accident {
    microbatch: usize,
    until: Until,
}

const ACCIDENTS: [Accident; 7] = [
    Accident { microbatch: 0, until: Until::FirstForward },
    Accident { microbatch: 0, until: Until::Forward },
    Accident { microbatch: 0, until: Until::FirstBackward },
    Accident { microbatch: 0, until: Until::Backward },
    Accident { microbatch: 0, until: Until::End },
    // All-reduces are under way, where the number of microbatches is known.
    Accident { microbatch: 1, until: Until::FirstBackward },
    Accident { microbatch: 1, until: Until::End },
];

#[test]
fn a_step_that_one_rank_drops_leaves_no_trace() {
    for accumulation in Accumulation::ALL {
        let options = ModelOptions { accumulation, ..ModelOptions::on(mesh(2, 2)) };
        let undisturbed = train_all(&options, |_| None);
        for accident in ACCIDENTS {
            let trained = train_all(&options, |rank| (rank == 2).then_some(accident));
            for (rank, trained) in trained.iter().enumerate() {
                assert_eq!(
                    trained.parameters, undisturbed[rank].parameters,
                    "{accumulation}, {accident:?}"
                );
                let told = "step 1 aborted by rank 2: the step was dropped before its finish";
                let expected: &[&str] = if rank == 2 { &[] } else { &[told] };
                assert_eq!(trained.aborts, expected, "{accumulation}, rank {rank}, {accident:?}");
            }
        }
    }
}

#[test]
fn two_ranks_that_drop_a_step_at_once_leave_no_trace_either() {
    let options = ModelOptions { prefetch: 2, ..ModelOptions::on(mesh(2, 2)) };
    let undisturbed = train_all(&options, |_| None);
    for accident in ACCIDENTS {
        for culprits in [[0, 3], [1, 2], [2, 3]] {
            let trained = train_all(&options, |rank| culprits.contains(&rank).then_some(accident));
            for (rank, trained) in trained.iter().enumerate() {
                assert_eq!(
                    trained.parameters, undisturbed[rank].parameters,
                    "{culprits:?}, {accident:?}"
                );
                let innocent = !culprits.contains(&rank);
                assert!(
                    trained.aborts.len() == 1 || !innocent,
                    "rank {rank}: {:?}",
                    trained.aborts
                );
            }
        }
    }
}

#[test]
fn ranks_that_drop_a_step_in_different_places_leave_no_trace_either() {
    let options = ModelOptions::on(mesh(2, 2));
    let undisturbed = train_all(&options, |_| None);
    let trained = train_all(&options, |rank| ACCIDENTS.get(rank * 2).copied());
    for (trained, undisturbed) in trained.iter().zip(&undisturbed) {
        assert_eq!(trained.parameters, undisturbed.parameters);
    }
}

/// Collectives of 32 KiB and more are done by worker threads, some of it after the step has been given up.
#[test]
fn a_step_dropped_while_workers_are_busy_leaves_no_trace_either() {
    let spec = ModelSpec::new().unit(layer("first", [150, 200])).unit(layer("second", [200, 150]));
    let options = ModelOptions::on(mesh(2, 2));
    let undisturbed = train_all_of(&spec, &options, |_| None);
    for accident in ACCIDENTS {
        let trained = train_all_of(&spec, &options, |rank| (rank == 1).then_some(accident));
        for (trained, undisturbed) in trained.iter().zip(&undisturbed) {
            assert_eq!(trained.parameters, undisturbed.parameters, "{accident:?}");
        }
    }
}

/// A rank finds its batch broken before it begins the step: it has no step to drop, and the others wait for its header.
#[test]
fn a_step_that_is_given_up_before_it_begins_is_begun_again_by_all() {
    let told = on_ranks(4, |world| {
        let mut model = model(world.clone(), &ModelOptions::on(mesh(2, 2)))?;
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
        let mut model = model(world, &options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        attempt(&mut model, &mut adamw, None)?;
        let told = attempt(&mut model, &mut adamw, None).expect_err("rank 2 fails");
        attempt(&mut model, &mut adamw, None)?;
        Ok::<_, Error>(told.to_string())
    });
    let own = "all_gather on rank 2, step 1: an injected error, in setup, step 1, microbatch 0";
    for (rank, told) in ended.into_iter().enumerate() {
        let told = told.expect("no panic").expect("it goes on");
        let expected = format!("step 1 aborted by rank 2: {own}");
        assert_eq!(told, if rank == 2 { own } else { &expected });
    }
}

#[test]
fn a_step_can_be_dropped_again_and_again() {
    let told = on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut aborts = 0;
        for attempt in 0..12 {
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let gives_up = attempt % 4 == rank;
            let ended = springs::microbatch(&mut step, Batch::of(rank, 0, 0))
                .and_then(|()| if gives_up { Ok(()) } else { step.finish().map(drop) });
            aborts += usize::from(ended.is_err());
        }
        Ok(aborts)
    });
    assert_eq!(told, [9; 4]);
}

#[test]
fn the_others_are_told_why_a_step_failed() {
    let outcomes = outcomes(2, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        let elements = if rank == 1 { 92 } else { 93 };
        pass.reduce(unit(2), vec![lend(vec![0.0; elements]), None])?;
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

#[test]
fn a_step_without_weight_is_refused_on_all_ranks_and_the_next_goes_on() {
    let norms = on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &ModelOptions::on(mesh(2, 2)))?;
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
fn a_rank_without_data_weighs_nothing() {
    let options = ModelOptions::on(mesh(2, 2));
    let gradients = |items: fn(usize) -> Batch| {
        common(on_ranks(4, |world| {
            let batch = items(world.rank().index());
            let mut model = model(world, &options)?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            springs::microbatch(&mut step, batch)?;
            step.finish()?.full(&model)
        }))
    };
    let uneven = gradients(|rank| if rank == 0 { Batch(0..8) } else { Batch(0..0) });
    let even = gradients(|rank| Batch(2 * rank as u64..2 * rank as u64 + 2));
    assert_eq!(uneven, even);
}

#[test]
fn a_rank_that_panics_in_its_step_ends_the_world_of_the_others_within_a_second() {
    let panicked = OnceLock::new();
    let ended = hsdp::launch(4, WorldOptions::default(), |world| {
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

/// Trains until the world ends; `after` is told the number of each step.
fn train_until_the_end(world: World, after: impl Fn(u64)) -> Result<(), Error> {
    let mut model = model(world, &ModelOptions::on(mesh(2, 2)))?;
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
    let Error::Comm(hsdp_comm::Error::WorldAborted { rank: culprit, step, reason, .. }) = error
    else {
        panic!("rank {rank}: {error}");
    };
    assert_eq!((culprit.index(), *step), (2, 1), "rank {rank}: {error}");
    assert!(matches!(reason, AbortReason::Panicked { .. }), "rank {rank}: {reason}");
    assert!(error.to_string().contains("the data of rank 2 is broken"), "rank {rank}: {error}");
}

/// What a rank has after its steps.
struct Trained {
    parameters: BTreeMap<String, Vec<f32>>,
    /// What it was told of steps that others gave up.
    aborts: Vec<String>,
}

fn train_all(
    options: &ModelOptions,
    accident: impl Fn(usize) -> Option<Accident> + Sync,
) -> Vec<Trained> {
    train_all_of(&three_units(), options, accident)
}

fn train_all_of(
    spec: &ModelSpec,
    options: &ModelOptions,
    accident: impl Fn(usize) -> Option<Accident> + Sync,
) -> Vec<Trained> {
    on_ranks(options.mesh.world_size(), |world| {
        let mut accident = accident(world.rank().index());
        let mut model = ShardedModel::new(world, spec.clone(), options.clone(), springs::initial)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let mut aborts = Vec::new();
        for _ in 0..ATTEMPTS {
            let now = if model.committed_steps() == 1 { accident.take() } else { None };
            match attempt(&mut model, &mut adamw, now) {
                Err(error) if error.is_fatal() => return Err(error),
                Err(error) if now.is_none() => aborts.push(error.to_string()),
                _ => {}
            }
            if model.committed_steps() == STEPS {
                break;
            }
        }
        assert_eq!(model.committed_steps(), STEPS, "{aborts:?}");
        Ok(Trained { parameters: model.full_parameters()?, aborts })
    })
}

/// One attempt at the next step, which ends early where this rank has an accident.
fn attempt(
    model: &mut ShardedModel,
    adamw: &mut AdamW,
    accident: Option<Accident>,
) -> Result<(), Error> {
    let (rank, number) = (model.rank().index(), model.committed_steps());
    let mut step = model.begin_step(StepOptions::microbatches(MICROBATCHES))?;
    for microbatch in 0..MICROBATCHES {
        let here = accident.filter(|accident| accident.microbatch == microbatch);
        let until = here.map_or(Until::End, |accident| accident.until);
        springs::microbatch_until(&mut step, Batch::of(rank, number, microbatch), until)?;
        if here.is_some() {
            return Ok(());
        }
    }
    let gradients = step.finish()?;
    adamw.step(model, gradients.clip(1.0)).map(drop)
}

fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, three_units(), options.clone(), springs::initial)
}
