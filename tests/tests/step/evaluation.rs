//! Evaluations: forwards without a backward, on ranks that may have different numbers of batches.

use std::mem::ManuallyDrop;
use std::thread;
use std::time::Instant;

use hsdp::testing::{Fault, FaultKind, FaultPlace};
use hsdp::{
    AdamW, AdamWOptions, Channel, DataError, Error, Evaluation, Event, FullCopies, LossSum,
    ModelOptions, Op, Optimizer, Phase, Rank, ShardedModel, StepOptions, Tag, Uneven,
    UnitGradients, UnitOrder, WorldOptions,
};
use hsdp_comm::Between;
use hsdp_tests::support::models::unit;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{DEADLINE, common, mesh, on_ranks};

#[test]
fn the_mean_is_over_all_items_of_ranks_with_different_numbers_of_batches() {
    for full_copies in FullCopies::ALL {
        let mean = common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let options = ModelOptions { full_copies, ..ModelOptions::on(mesh(2, 2)) };
            let mut model = springs::model(world, &options)?;
            let mut evaluation = model.evaluation()?;
            // Rank 0 has no batch; batch b of rank r has r + b items of value r.
            let mut sum = 0.0;
            let mut items = 0;
            for batch in 0..rank {
                forward(&mut evaluation, &[0, 1, 2])?;
                sum += (rank * (rank + batch)) as f64;
                items += (rank + batch) as u64;
            }
            evaluation.mean(sum, items)
        }));
        // Items: 1; 2 + 3; 3 + 4 + 5.
        let exact = f64::from(1 + 2 * 5 + 3 * 12) / f64::from(1 + 5 + 12);
        assert_eq!(mean.to_bits(), exact.to_bits(), "{full_copies}");
    }
}

#[test]
fn each_unit_is_gathered_once_a_batch_and_nothing_is_reduced() {
    let events = on_ranks(4, |world| {
        let rank = world.rank().index();
        let ledger = world.clone();
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        train(&mut model, 1)?;
        let before = ledger.ledger();
        model.record_events();
        let mut evaluation = model.evaluation()?;
        for _ in 0..=rank {
            forward(&mut evaluation, &[0, 1, 2])?;
        }
        let _ = evaluation.mean(0.0, 1)?;
        let moved = ledger.ledger().since(&before);
        assert_eq!(
            moved.channel(Channel::Reduce).calls + moved.channel(Channel::AllReduce).calls,
            0
        );
        Ok(model.take_events())
    });
    for events in events {
        let gathers = events.iter().filter(|event| match event {
            Event::Gather { phase, .. } => {
                assert_eq!(*phase, Phase::Forward);
                true
            }
            Event::Unshard { .. } => false,
            other => panic!("{other:?}"),
        });
        assert_eq!(gathers.count(), 4 * 3, "three units in each of four batches, on every rank");
    }
}

/// Parameters, moments and the order of the units are as without evaluations: training goes on with
/// the same bits.
#[test]
fn training_goes_on_as_if_nothing_had_happened() {
    let trained = |evaluates: bool| {
        common(on_ranks(2, |world| {
            let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            for _ in 0..3 {
                if evaluates {
                    let mut evaluation = model.evaluation()?;
                    forward(&mut evaluation, &[2, 1, 0])?;
                    let _ = evaluation.mean(1.0, 1)?;
                }
                let gradients = springs::gradients(&mut model, 1)?;
                adamw.step(&mut model, gradients)?;
            }
            Ok((model.plan().order().to_vec(), model.full_parameters()?))
        }))
    };
    assert_eq!(trained(true), trained(false));
}

/// Ranks that have no batch left gather along in a `finish`, too. Nothing is aborted: the world
/// stays in its epoch.
#[test]
fn an_evaluation_of_different_numbers_of_batches_ends_without_a_mean() {
    let gathers = common(on_ranks(4, |world| {
        let rank = world.rank().index();
        let kept = world.clone();
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        train(&mut model, 1)?;
        model.record_events();
        let mut evaluation = model.evaluation()?;
        for _ in 0..rank {
            forward(&mut evaluation, &[0, 1, 2])?;
        }
        evaluation.finish()?;
        let gathers = model.take_events();
        let gathers = gathers.iter().filter(|event| matches!(event, Event::Gather { .. })).count();
        model.evaluation()?.finish()?;
        let mean = model.evaluation()?.mean(3.0, 2)?;
        train(&mut model, 1)?;
        assert_eq!((mean, kept.epoch()), (1.5, 0));
        Ok(gathers)
    }));
    assert_eq!(gathers, 3 * 3, "three units in each of three batches");
}

/// A mean without the items of some ranks is an error on all of them, also where a rank gathers
/// along in the batches of another one. The evaluation is over, and training goes on.
#[test]
fn ranks_that_end_an_evaluation_by_different_calls_are_named_on_all_of_them() {
    for finishes in
        [[false, true, false, false], [true, false, true, true], [true, true, false, false]]
    {
        let told = common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let kept = world.clone();
            let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
            let mut evaluation = model.evaluation()?;
            for _ in 0..rank {
                forward(&mut evaluation, &[0, 1, 2])?;
            }
            let ended = match finishes[rank] {
                true => evaluation.finish(),
                false => evaluation.mean(1.0, 1).map(drop),
            };
            let error = ended.expect_err("the calls differ").to_string();
            train(&mut model, 2)?;
            assert_eq!(kept.epoch(), 0);
            Ok(error)
        }));
        let (rank, other) = if finishes == [true, true, false, false] { (2, 0) } else { (1, 0) };
        let call = |rank: usize| if finishes[rank] { "`finish`" } else { "`mean`" };
        let expected = format!(
            "the end of the evaluation differs between ranks: rank {rank} has {}, rank {other} has \
             {}",
            call(rank),
            call(other)
        );
        assert_eq!(told, expected);
    }
}

#[test]
fn a_batch_has_no_backward() {
    on_ranks(2, |world| {
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut evaluation = model.evaluation()?;
        let mut pass = evaluation.batch()?;
        assert!(!pass.handle().has_backward());
        for error in [
            pass.loss(LossSum::new(0.0, 1)).map(drop).expect_err("no backward"),
            pass.reduce(unit(0), UnitGradients::new().without().without())
                .expect_err("no backward"),
        ] {
            assert!(
                error.to_string().contains("a batch of an evaluation has no backward"),
                "{error}"
            );
        }
        let _ = pass.unshard(unit(0))?;
        let again = pass.unshard(unit(0)).expect_err("it is gathered once").to_string();
        assert!(again.contains("unit first has been gathered"), "{again}");
        pass.finish()?;
        evaluation.finish()
    });
}

/// A batch of an evaluation with a backward has the gathers of a microbatch of training, on ranks
/// that come to the backward, that end the batch before, and that have no batch. Nothing is reduced.
#[test]
fn an_evaluation_with_a_backward_gathers_as_a_microbatch_and_reduces_nothing() {
    let variants = FullCopies::ALL.into_iter().flat_map(|copies| [(copies, false), (copies, true)]);
    for (full_copies, trains_before) in variants {
        let gathers = common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let ledger = world.clone();
            let options = ModelOptions { full_copies, ..ModelOptions::on(mesh(2, 2)) };
            let mut model = springs::model(world, &options)?;
            train(&mut model, u64::from(trains_before))?;
            let before = ledger.ledger();
            model.record_events();
            let mut evaluation = model.evaluation_with_backward()?;
            for _ in 0..[0, 1, 2, 2][rank] {
                let mut pass = evaluation.batch()?;
                assert!(pass.handle().has_backward() && pass.handle().is_evaluation());
                for error in [
                    pass.loss(LossSum::new(0.0, 1)).map(drop).expect_err("no loss"),
                    pass.reduce(unit(0), UnitGradients::new().without().without())
                        .expect_err("no gradients"),
                ] {
                    assert!(error.to_string().contains("takes part in the backward"), "{error}");
                }
                let used: &[usize] = if rank == 3 { &[0, 1, 2] } else { &[0, 1, 2, 2, 1, 0] };
                for index in used {
                    let _full = pass.unshard(unit(*index))?;
                }
                pass.finish()?;
            }
            evaluation.finish()?;
            let moved = ledger.ledger().since(&before);
            let reduced = [Channel::Reduce, Channel::AllReduce].map(|it| moved.channel(it).calls);
            assert_eq!(reduced, [0, 0]);
            let gathers = model.take_events().into_iter().filter_map(|event| match event {
                Event::Gather { unit, phase, .. } => Some((unit, phase)),
                _ => None,
            });
            let gathers: Vec<_> = gathers.collect();
            let planned = model.plan().gathers().iter().map(|it| (it.unit, it.phase));
            assert_eq!(gathers, planned.clone().chain(planned).collect::<Vec<_>>());
            train(&mut model, 1)?;
            Ok(gathers.len())
        }));
        assert_eq!(gathers, 2 * 6, "three units, twice in each of two batches");
    }
}

/// A rank that gathers for a backward and others that do not would wait for each other.
#[test]
fn ranks_with_evaluations_of_two_kinds_are_named_on_all_of_them() {
    for odd in [0, 2] {
        for with_backward in [false, true] {
            let told = common(on_ranks(4, |world| {
                let rank = world.rank().index();
                let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
                let mut evaluation = match (rank == odd) == with_backward {
                    true => model.evaluation_with_backward()?,
                    false => model.evaluation()?,
                };
                // Rank 2 has no batch.
                let error = match rank {
                    2 => evaluation.finish().expect_err("the kinds differ"),
                    _ => {
                        let error = evaluation.batch().map(drop).expect_err("the kinds differ");
                        drop(evaluation);
                        error
                    }
                };
                train(&mut model, 2)?;
                Ok(error.to_string())
            }));
            let mut calls = ["`evaluation`", "`evaluation_with_backward`"];
            if !with_backward {
                calls.reverse();
            }
            let [usual, rare] = calls;
            let other = usize::from(odd == 0);
            let expected = format!(
                "the kind of the evaluation differs between ranks: rank {odd} has {rare}, rank \
                 {other} has {usual}"
            );
            assert_eq!(told, expected);
        }
    }
}

#[test]
fn an_evaluation_without_items_is_an_error_on_all_ranks_and_the_run_goes_on() {
    on_ranks(2, |world| {
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut evaluation = model.evaluation()?;
        forward(&mut evaluation, &[0, 1, 2])?;
        let error = evaluation.mean(0.0, 0).expect_err("no items");
        assert!(matches!(error, Error::Data(DataError::EmptyEvaluation { .. })), "{error}");
        train(&mut model, 1)
    });
}

#[test]
fn a_rank_that_gives_an_evaluation_up_tells_the_others_and_the_run_goes_on() {
    on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut evaluation = model.evaluation()?;
        if rank == 3 {
            evaluation.batch()?.handle().note_failure(&"the tokens cannot be read");
            drop(evaluation);
        } else {
            let ended = forward(&mut evaluation, &[0, 1, 2]);
            let ended = ended.and_then(|()| evaluation.mean(0.0, 1).map(drop));
            let error = ended.expect_err("rank 3 gave up").to_string();
            assert!(error.contains("aborted by rank 3: the tokens cannot be read"), "{error}");
        }
        train(&mut model, 2)
    });
}

#[test]
fn a_step_that_is_under_way_refuses_an_evaluation() {
    on_ranks(2, |world| {
        let rank = world.rank();
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        let _leaked = ManuallyDrop::new(model.begin_step(StepOptions::microbatches(1))?);
        let error = model.evaluation().expect_err("a step is under way").to_string();
        let expected = "step 0: step 0 was neither finished nor dropped";
        assert_eq!(error, format!("evaluation on rank {rank}, {expected}"));
        Ok(())
    });
}

#[test]
fn an_evaluation_that_was_leaked_costs_itself_and_not_the_run() {
    on_ranks(2, |world| {
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        let _leaked = ManuallyDrop::new(model.evaluation()?);
        let error = model.begin_step(StepOptions::microbatches(1)).expect_err("it was leaked");
        assert!(
            error.to_string().ends_with("an evaluation was neither finished nor dropped"),
            "{error}"
        );
        train(&mut model, 1)
    });
}

/// A thread of rank 0 waits in a gather for which rank 1 does not come: the drop is announced
/// without waiting for it.
#[test]
fn a_drop_is_announced_though_another_thread_waits_in_a_batch() {
    let started = Instant::now();
    on_ranks(2, |world| {
        let order = UnitOrder::Error;
        let mut model =
            springs::model(world.clone(), &ModelOptions { order, ..ModelOptions::on(mesh(1, 2)) })?;
        let mut evaluation = model.evaluation()?;
        let handle = evaluation.batch()?.handle();
        let told = if world.rank().index() == 0 {
            let waiting = thread::spawn(move || handle.unshard(unit(0)).map(drop));
            while world.ledger().op(Channel::Gather, Op::AllGather).calls == 0 {
                thread::yield_now();
            }
            drop(evaluation);
            waiting.join().expect("no panic").expect_err("it is gone").to_string()
        } else {
            let group = world.world_group(Channel::User);
            let met = group.barrier(Tag::default()).and_then(|pending| pending.wait());
            met.expect_err("rank 0 does not come").to_string()
        };
        assert!(told.contains("aborted by rank 0"), "{told}");
        Ok(())
    });
    assert!(started.elapsed() < DEADLINE / 2, "{:?}", started.elapsed());
}

/// Each call of a rank fails in turn, in the making of the model and in an evaluation: all ranks
/// learn of it, and try again.
#[test]
fn whatever_call_of_a_rank_fails_all_ranks_can_evaluate_again() {
    for (culprit, kind) in [(0, FaultKind::Error), (1, FaultKind::OutOfMemory)] {
        let mut call = 0;
        while evaluated_with(Fault::at(Rank::new(culprit), 0, FaultPlace::Call(call), kind)) > 0 {
            call += 1;
        }
        assert!(call > 10, "rank {culprit} makes {call} calls");
    }
}

/// Evaluates until it succeeds, and returns how often a rank has failed.
fn evaluated_with(fault: Fault) -> usize {
    let options =
        WorldOptions { deadline: DEADLINE, faults: vec![fault], ..WorldOptions::default() };
    let failed = hsdp::launch(2, options, |world| -> Result<usize, Error> {
        let options = ModelOptions { uneven: Uneven::ZeroWeight, ..ModelOptions::on(mesh(1, 2)) };
        let (mut model, first) = tried(|| springs::model(world.clone(), &options))?;
        let rank = model.rank().index();
        let (mean, then) = tried(|| {
            let mut evaluation = model.evaluation()?;
            for _ in 0..rank {
                forward(&mut evaluation, &[2, 0, 1])?;
            }
            evaluation.mean(3.0, 2)
        })?;
        assert_eq!(mean, 1.5);
        Ok(first + then)
    });
    let failed = failed.into_iter().map(|end| end.expect("they recover"));
    common(failed.collect())
}

/// Ranks that compute for different times, and gather more or less ahead, come to the operations of
/// both models in one order.
#[test]
fn ranks_of_different_speeds_train_through_another_model() {
    for between in [Between::Memory, Between::Messages] {
        for prefetch in [0, 1, usize::MAX] {
            let options = WorldOptions { deadline: DEADLINE, between, ..WorldOptions::default() };
            let losses = hsdp::launch(4, options, |world| -> Result<f64, Error> {
                let rank = world.rank().index() as u64;
                let options = ModelOptions { prefetch, ..ModelOptions::on(mesh(2, 2)) };
                let mut model = springs::model(world.clone(), &options)?;
                let mut critic = springs::model(world, &options)?;
                let mut turn = rank;
                let mut loss = 0.0;
                for _ in 0..3 {
                    loss += train_through(&mut model, &mut critic, || {
                        turn = (turn * 5 + 3) % 64;
                        (0..turn % 4 * rank * 100).for_each(|_| thread::yield_now());
                    })?;
                    train(&mut critic, 1)?;
                }
                Ok(loss)
            });
            for loss in losses {
                assert_eq!(loss.expect("no rank waits for ever"), 6.0);
            }
        }
    }
}

/// A rank that gathers along in the evaluation alone, while the others wait for it in the model that
/// is trained: an error on all ranks, not a hang.
#[test]
fn a_rank_that_gathers_along_in_one_of_two_models_ends_the_world() {
    let ends =
        hsdp::launch(2, WorldOptions { deadline: DEADLINE, ..WorldOptions::default() }, |world| {
            let rank = world.rank().index();
            let options =
                ModelOptions { uneven: Uneven::ZeroWeight, ..ModelOptions::on(mesh(1, 2)) };
            let mut model = springs::model(world.clone(), &options)?;
            let mut critic = springs::model(world, &options)?;
            if rank == 0 {
                return train_through(&mut model, &mut critic, || {}).map(drop);
            }
            let step = model.begin_step(StepOptions::microbatches(1).without_data())?;
            critic.evaluation_with_backward()?.finish()?;
            step.finish().map(drop)
        });
    for end in ends {
        let error = end.expect_err("each rank waits for the other one").to_string();
        assert!(error.contains("ranks wait for each other in different operations"), "{error}");
    }
}

/// Each call of a rank fails in turn, in a step whose backward goes through an evaluation of another
/// model: both are aborted on all ranks, which try again.
#[test]
fn whatever_call_of_a_rank_fails_all_ranks_can_train_through_another_model_again() {
    for (culprit, kind) in [(0, FaultKind::Error), (1, FaultKind::OutOfMemory)] {
        let mut call = 0;
        while trained_through_with(Fault::at(Rank::new(culprit), 0, FaultPlace::Call(call), kind))
            > 0
        {
            call += 1;
        }
        assert!(call > 20, "rank {culprit} makes {call} calls");
    }
}

/// Makes two models and a step until they succeed, and returns how often a rank has failed.
fn trained_through_with(fault: Fault) -> usize {
    let options =
        WorldOptions { deadline: DEADLINE, faults: vec![fault], ..WorldOptions::default() };
    let failed = hsdp::launch(2, options, |world| -> Result<usize, Error> {
        let options = ModelOptions::on(mesh(1, 2));
        let (mut model, first) = tried(|| springs::model(world.clone(), &options))?;
        let (mut critic, second) = tried(|| springs::model(world.clone(), &options))?;
        let (loss, then) = tried(|| train_through(&mut model, &mut critic, || {}))?;
        assert_eq!(loss, 2.0);
        Ok(first + second + then)
    });
    let failed = failed.into_iter().map(|end| end.expect("they recover"));
    common(failed.collect())
}

/// A step of one microbatch whose backward goes through a batch of another model. `compute` runs
/// before each call.
fn train_through(
    model: &mut ShardedModel,
    critic: &mut ShardedModel,
    mut compute: impl FnMut(),
) -> Result<f64, Error> {
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let mut evaluation = critic.evaluation_with_backward()?;
    let mut pass = step.microbatch()?;
    let mut judged = evaluation.batch()?;
    for index in 0..3 {
        compute();
        let _full = pass.unshard(unit(index))?;
    }
    for index in [0, 1, 2] {
        compute();
        let _full = judged.unshard(unit(index))?;
    }
    let _ = pass.loss(LossSum::new(2.0, 1))?;
    for index in [2, 1, 0] {
        compute();
        let _full = judged.unshard(unit(index))?;
    }
    for index in [2, 1, 0] {
        compute();
        let _full = pass.unshard(unit(index))?;
        compute();
        let params = pass.handle().plan().spec()[unit(index)].params.clone();
        let zeros = params.iter().map(|param| vec![0.0_f32; param.numel()]);
        pass.reduce(unit(index), UnitGradients::of(zeros))?;
    }
    pass.finish()?;
    judged.finish()?;
    evaluation.finish()?;
    Ok(step.finish()?.loss())
}

/// The result of the first try without an error, and the number of tries before it.
fn tried<T>(mut act: impl FnMut() -> Result<T, Error>) -> Result<(T, usize), Error> {
    let mut failed = 0;
    loop {
        match act() {
            Ok(result) => return Ok((result, failed)),
            Err(error) if error.is_fatal() => return Err(error),
            Err(_) => failed += 1,
        }
    }
}

/// One batch that uses the units in this order.
fn forward(evaluation: &mut Evaluation<'_>, used: &[usize]) -> Result<(), Error> {
    let mut pass = evaluation.batch()?;
    for index in used {
        let _full = pass.unshard(unit(*index))?;
    }
    pass.finish()
}

fn train(model: &mut ShardedModel, steps: u64) -> Result<(), Error> {
    for _ in 0..steps {
        let gradients = springs::gradients(model, 1)?;
        model.update(gradients, |_| {})?;
    }
    Ok(())
}
