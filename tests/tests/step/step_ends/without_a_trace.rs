//! A step that was given up leaves no trace: training ends with the parameters of a run in which no
//! step was given up.

use std::collections::BTreeMap;

use hsdp::{
    Accumulation, AdamW, AdamWOptions, Error, ModelOptions, ModelSpec, StepOptions, WorldOptions,
};
use hsdp_comm::StepFailure;
use hsdp_tests::support::handmade::Until;
use hsdp_tests::support::models::{layer, three_units};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{mesh, on_ranks};

use crate::step_ends::{Accident, STEPS, attempt};

/// One attempt at each step, another for each rank that may give one up, and no end of them in no
/// case.
const ATTEMPTS: u64 = STEPS + 4;

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

/// Collectives of 32 KiB and more are done by worker threads, some of it after the step has been
/// given up.
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

#[test]
fn a_step_can_be_dropped_again_and_again() {
    let told = on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
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

/// A rank that does by hand what the model does for it (it announces the end of its step, and goes
/// on to the next epoch) does not end the next step, too, when it drops this one.
#[test]
fn a_step_that_was_left_behind_by_hand_is_given_up_once() {
    let epochs = hsdp::launch(2, WorldOptions::default(), |world| -> Result<_, Error> {
        let rank = world.rank().index();
        let options = ModelOptions::on(mesh(1, 2));
        let mut model = springs::model(world.clone(), &options)?;
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
        assert_eq!(epoch.expect("a clean step"), 1);
    }
}

/// The state of a rank after its steps.
struct Trained {
    parameters: BTreeMap<String, Vec<f32>>,
    /// The errors that it got for steps that others gave up.
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
        let mut model = springs::model_of(world, spec, options)?;
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
