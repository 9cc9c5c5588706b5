//! Gathers of slices that are under way when a step, an evaluation or another call is given up.

use std::mem::ManuallyDrop;
use std::sync::Barrier;

use hsdp::{
    AdamW, Channel, DType, DataError, Error, Flow, ModelOptions, Op, Precision, Samples,
    ShardedModel, StateOver, StepOptions,
};
use hsdp_tests::support::handmade::Until;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::training::{self, Trace, Training};

const STEPS: usize = 4;

fn options(dtype: DType) -> ModelOptions {
    let precision = Precision { parameters: dtype, ..Precision::default() };
    ModelOptions { precision, state: StateOver::World, ..ModelOptions::on(mesh(2, 2)) }
}

const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

/// Trains, and calls `between` after each update, which may give something up. Returns what the
/// steps end with.
fn trained(
    options: &ModelOptions,
    between: impl Fn(&mut Training<'_, AdamW>) -> Result<(), Error> + Sync,
) -> Vec<Trace> {
    let recipe = training::adamw();
    common(on_ranks(options.mesh.world_size(), |world| {
        let mut training = Training::new(world, &recipe, options)?;
        let mut traces = Vec::new();
        for _ in 0..STEPS {
            training.step()?;
            between(&mut training)?;
            traces.push(training.traced_step()?);
        }
        Ok(traces)
    }))
}

/// Begins a step, of which this rank does a part, or as much as the others leave it.
fn give_up(model: &mut ShardedModel, until: Option<Until>) -> Result<(), Error> {
    let rank = model.rank().index();
    let number = model.committed_steps();
    let mut step = model.begin_step(StepOptions::microbatches(2))?;
    if let Some(until) = until {
        springs::microbatch_until(&mut step, Batch::of(rank, number, 0), until)?;
    }
    drop(step);
    Ok(())
}

#[test]
fn a_step_that_is_given_up_loses_no_slice() {
    let parts = [None, Some(Until::FirstForward), Some(Until::Forward), Some(Until::End)];
    for dtype in DTYPES {
        let options = options(dtype);
        let undisturbed = trained(&options, |_| Ok(()));
        for until in parts {
            for rank in [0, 3] {
                let disturbed = trained(&options, |training| {
                    let is_first = training.model.rank().index() == rank;
                    let until = if is_first { until } else { Some(Until::End) };
                    match give_up(&mut training.model, until) {
                        Err(error) if error.is_fatal() => Err(error),
                        _ => Ok(()),
                    }
                });
                assert_eq!(disturbed, undisturbed, "{dtype}, rank {rank} until {until:?}");
            }
        }
    }
}

#[test]
fn an_evaluation_that_is_dropped_loses_no_slice() {
    for dtype in DTYPES {
        let options = options(dtype);
        let undisturbed = trained(&options, |_| Ok(()));
        let disturbed = trained(&options, |training| {
            let mut evaluation = training.model.evaluation()?;
            let batch = evaluation.batch();
            match batch {
                Err(error) if error.is_fatal() => return Err(error),
                Err(_) => {}
                Ok(mut batch) => {
                    // The first unit is gathered, or another rank has dropped its evaluation.
                    let _ = batch.unshard(hsdp::UnitId::new(0));
                }
            }
            drop(evaluation);
            Ok(())
        });
        assert_eq!(disturbed, undisturbed, "{dtype}");
    }
}

#[test]
fn failures_of_one_rank_between_steps_lose_no_slice_of_late_ranks() {
    for (dtype, failures) in [(DTYPES[0], 1), (DTYPES[1], 1), (DTYPES[0], 2), (DTYPES[1], 3)] {
        let options = options(dtype);
        let undisturbed = trained(&options, |_| Ok(()));
        let recipe = training::adamw();
        let barrier = Barrier::new(4);
        let disturbed = common(on_ranks(4, |world| {
            let mut training = Training::new(world.clone(), &recipe, &options)?;
            let other = Training::new(world, &recipe, &options)?;
            let mut traces = Vec::new();
            for _ in 0..STEPS {
                let is_late = training.model.rank().index() == 0;
                let gradients = training.gradients()?;
                if is_late {
                    // The others have updated, and one of them has failed.
                    barrier.wait();
                }
                training.update(gradients)?;
                let is_failing = training.model.rank().index() == 3;
                for _ in 0..if is_failing { failures } else { 0 } {
                    let refused = training.model.with_shards(&other.state.1, |_| Ok(()));
                    assert!(matches!(refused, Err(Error::Misuse { .. })), "{refused:?}");
                }
                if !is_late {
                    barrier.wait();
                }
                // The slices may have been lost: then the call names the remedy.
                for unit in training.model.plan().spec().unit_ids() {
                    if let Err(error) = training.model.shard(unit) {
                        let told = error.to_string();
                        assert!(told.contains("`await_slices` gathers them"), "{told}");
                    }
                }
                traces.push(loop {
                    match training.gradients() {
                        Ok(gradients) => break training.traced(gradients)?,
                        Err(error) if error.is_fatal() => return Err(error),
                        Err(_) => {}
                    }
                });
            }
            drop(other);
            Ok(traces)
        }));
        assert_eq!(disturbed, undisturbed, "{dtype}");
    }
}

/// Each rank reads the norms after an update. One fails in it, and the others learn it there, also
/// the rank that is late in its update.
#[test]
fn a_collective_that_fails_behind_an_update_is_refused_on_all_ranks() {
    for dtype in DTYPES {
        let options = options(dtype);
        let undisturbed = trained(&options, |_| Ok(()));
        let recipe = training::adamw();
        let barrier = Barrier::new(4);
        let disturbed = common(on_ranks(4, |world| {
            let mut training = Training::new(world.clone(), &recipe, &options)?;
            let mut other = Training::new(world, &recipe, &options)?;
            let mut traces = Vec::new();
            for _ in 0..STEPS {
                let rank = training.model.rank().index();
                let gradients = training.gradients()?;
                if rank == 0 {
                    barrier.wait();
                }
                training.update(gradients)?;
                let failed = match rank {
                    // The other ranks' norms are not of this model.
                    3 => training.model.with_shards(&other.state.1, |_| Ok::<_, Error>(())),
                    _ => training.model.norms().map(drop),
                };
                let error = failed.expect_err("one rank fails, and the others learn it");
                assert!(!error.is_fatal(), "rank {rank}: {error}");
                if rank > 0 {
                    barrier.wait();
                }
                // A second model is trained meanwhile.
                other.step()?;
                traces.push(training.traced_step()?);
            }
            Ok(traces)
        }));
        assert_eq!(disturbed, undisturbed, "{dtype}");
    }
}

/// Returns the parameters of all units as an evaluation gathers them.
fn gathered(model: &mut ShardedModel) -> Result<Vec<Vec<u32>>, Error> {
    let units: Vec<_> = model.plan().spec().unit_ids().collect();
    let mut evaluation = model.evaluation()?;
    let mut pass = evaluation.batch()?;
    let mut values = Vec::new();
    for unit in units {
        let full = pass.unshard(unit)?;
        let params = 0..pass.handle().plan().spec()[unit].params.len();
        let bits = |index| full.values(index).to_f32().into_iter().map(f32::to_bits).collect();
        values.extend(params.map(bits));
    }
    pass.finish()?;
    evaluation.finish()?;
    Ok(values)
}

/// Begins steps until one ends where it begins, with this error of all ranks.
fn begin_in_vain(
    model: &mut ShardedModel,
    options: StepOptions,
    is_expected: fn(&DataError) -> bool,
) -> Result<(), Error> {
    loop {
        match model.begin_step(options) {
            Ok(_) => panic!("the step begins"),
            Err(Error::Data(error)) if is_expected(&error) => return Ok(()),
            Err(error) if error.is_fatal() => return Err(error),
            // The epoch that another rank has ended.
            Err(_) => {}
        }
    }
}

/// Ranks that have lost slices say so where a step begins, and the step does not begin, because the
/// ranks agree that it cannot. The epoch goes on, and so the slices must not count as gathered.
#[test]
fn lost_slices_stay_lost_where_a_step_does_not_begin() {
    let options = options(DType::BF16);
    let uneven = |rank: usize| match rank {
        1 => StepOptions::microbatches(2).without_data(),
        _ => StepOptions::microbatches(2),
    };
    let same = |_| StepOptions { samples: Some(Samples::of([7])), ..uneven(0) };
    let is_uneven = |error: &DataError| matches!(error, DataError::UnevenInputs { .. });
    let is_same = |error: &DataError| matches!(error, DataError::SameSamples { .. });
    type Begun<'a> = (&'a (dyn Fn(usize) -> StepOptions + Sync), fn(&DataError) -> bool);
    let begun: [Begun<'_>; 2] = [(&uneven, is_uneven), (&same, is_same)];
    let recipe = training::adamw();
    let run = |begun: Option<Begun<'_>>| {
        let barrier = Barrier::new(4);
        common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut training = Training::new(world.clone(), &recipe, &options)?;
            let other = Training::new(world, &recipe, &options)?;
            let mut evaluated = Vec::new();
            for _ in 0..STEPS {
                let gradients = training.gradients()?;
                if rank == 0 {
                    barrier.wait();
                }
                training.update(gradients)?;
                if let Some((options, is_expected)) = begun {
                    // One rank ends the epoch, while a replica is still in its update. The others
                    // learn it where they read their slices.
                    let ended = match rank {
                        3 => training.model.with_shards(&other.state.1, |_| Ok(())),
                        _ => training.model.norms().map(drop),
                    };
                    assert!(ended.is_err_and(|error| !error.is_fatal()), "rank {rank}");
                    if rank > 0 {
                        barrier.wait();
                    }
                    begin_in_vain(&mut training.model, options(rank), is_expected)?;
                } else if rank > 0 {
                    barrier.wait();
                }
                evaluated.push(gathered(&mut training.model)?);
            }
            drop(other);
            Ok((evaluated, training.traced_step()?))
        }))
    };
    let undisturbed = run(None);
    for begun in begun {
        assert!(run(Some(begun)) == undisturbed, "stale slices were used");
    }
}

/// Replicas that divide no state gather nothing over themselves, also behind a step that was given
/// up.
#[test]
fn whole_state_is_not_gathered_over_the_replicas() {
    let options = ModelOptions { state: StateOver::Shards, ..options(DType::F32) };
    let recipe = training::adamw();
    let flows = on_ranks(4, |world| {
        let mut training = Training::new(world.clone(), &recipe, &options)?;
        for _ in 0..STEPS {
            training.step()?;
            let until = (world.rank().index() != 3).then_some(Until::End);
            match give_up(&mut training.model, until) {
                Err(error) if error.is_fatal() => return Err(error),
                _ => {}
            }
            training.model.await_slices()?;
        }
        training.step()?;
        Ok(world.ledger().op(Channel::AllReduce, Op::AllGather))
    });
    assert_eq!(flows, [Flow::NONE; 4]);
}

/// A call between steps behind a step that was neither finished nor dropped is refused before it
/// says anything to other ranks.
#[test]
fn slices_are_not_awaited_within_a_step() {
    let options = options(DType::F32);
    let recipe = training::adamw();
    common(on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut training = Training::new(world, &recipe, &options)?;
        training.step()?;
        let step = training.model.begin_step(StepOptions::microbatches(2))?;
        if rank == 2 {
            // Leaked, as by a program that forgets it.
            let _leaked = ManuallyDrop::new(step);
            let refused = training.model.await_slices();
            let told = refused.expect_err("a step is under way").to_string();
            assert!(told.contains("was neither finished nor dropped"), "{told}");
        } else {
            drop(step);
        }
        loop {
            match training.traced_step() {
                Err(error) if error.is_fatal() => return Err(error),
                Err(_) => {}
                Ok(trace) => return Ok(trace),
            }
        }
    }));
}
