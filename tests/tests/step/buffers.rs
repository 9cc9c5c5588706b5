//! Buffers: values that the forward writes, and that are equal on all ranks when a step has ended.

use std::collections::BTreeMap;

use hsdp::{
    DynamicScale, Error, LossScaling, LossSum, ModelOptions, NonFinite, Optimizer as _, Param,
    ShardedModel, Step, StepOptions, Uneven, Unused, Verdict, World,
};
use hsdp_comm::{Channel, Op};
use hsdp_sharding::{BufferId, ModelSpec, Unit};
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

/// Three units with a buffer that ranks write equally, and one that is averaged.
fn spec() -> ModelSpec {
    let statistics = Unit::new("statistics")
        .param(Param::new("scale", [4]))
        .param(Param::new("mean", [3]).buffer())
        .param(Param::new("own", [2]).averaged_buffer());
    three_units().unit(statistics)
}

fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, spec(), options.clone(), initial)
}

fn initial(param: &Param) -> Vec<f32> {
    match &*param.name {
        "mean" => vec![1.0, 2.0, 3.0],
        "own" => vec![0.0; 2],
        _ => springs::initial(param),
    }
}

fn id(name: &str) -> BufferId {
    spec().find_buffer(name).expect("the model has it")
}

/// Adds numbers to both buffers, and runs a microbatch.
fn microbatch(step: &mut Step<'_>, batch: Batch, adds: [f32; 2]) -> Result<(), Error> {
    let pass = step.microbatch()?;
    let handle = pass.handle();
    for (name, add) in ["mean", "own"].into_iter().zip(adds) {
        let values: Vec<f32> = handle.buffer(id(name))?.iter().map(|it| it + add).collect();
        handle.write_buffer(id(name), &values)?;
    }
    springs::forward_and_backward(pass, batch)
}

/// The buffers by name, in full.
fn buffers(model: &ShardedModel) -> Result<BTreeMap<String, Vec<f32>>, Error> {
    let all = model.full_parameters()?;
    Ok(all.into_iter().filter(|(name, _)| ["mean", "own"].contains(&&**name)).collect())
}

fn are(mean: f32, own: f32) -> BTreeMap<String, Vec<f32>> {
    let mean = [1.0, 2.0, 3.0].map(|it| it + mean).to_vec();
    BTreeMap::from([("mean".to_owned(), mean), ("own".to_owned(), vec![own; 2])])
}

#[test]
fn writes_count_at_the_end_of_a_step() {
    for sizes in [[1, 1], [2, 2], [1, 3], [4, 1]] {
        let ranks = sizes[0] * sizes[1];
        let found = common(on_ranks(ranks, |world| {
            let rank = world.rank().index();
            let mut model = model(world, &ModelOptions::on(mesh(sizes[0], sizes[1])))?;
            let mut found = vec![buffers(&model)?];
            for number in 0..2 {
                let mut step = model.begin_step(StepOptions::microbatches(2))?;
                for index in 0..2 {
                    let batch = Batch::of(rank, number, index);
                    microbatch(&mut step, batch, [0.5, rank as f32])?;
                }
                let gradients = step.finish()?;
                found.push(buffers(&model)?);
                hsdp::Sgd::new(&model, hsdp::SgdOptions::default()).step(&mut model, gradients)?;
            }
            Ok(found)
        }));
        // The mean of 0, 1, ..., after two microbatches.
        let own = (ranks - 1) as f32;
        assert_eq!(found, [are(0.0, 0.0), are(1.0, own), are(2.0, 2.0 * own)], "{sizes:?}");
    }
}

/// Only the first step that counts is looked at, and only by rank 0.
#[test]
fn an_averaged_buffer_that_no_rank_writes_is_named_once() {
    for unused in [Unused::ErrorInFirstStep, Unused::Warn, Unused::Zeros, Unused::ErrorOnAnyRank] {
        let warnings = on_ranks(2, |world| {
            let rank = world.rank().index();
            let said = Said::default();
            tracing::subscriber::with_default(said.clone(), || {
                let options = ModelOptions { unused, ..ModelOptions::on(mesh(1, 2)) };
                let mut model = model(world, &options)?;
                let mut sgd = hsdp::Sgd::new(&model, hsdp::SgdOptions::default());
                for number in 0..2 {
                    let mut step = model.begin_step(StepOptions::microbatches(1))?;
                    springs::microbatch(&mut step, Batch::of(rank, number, 0))?;
                    let gradients = step.finish()?;
                    sgd.step(&mut model, gradients)?;
                }
                Ok::<_, Error>(())
            })?;
            Ok(said.warnings().into_iter().map(|(text, _)| text).collect::<Vec<_>>())
        });
        let [told, silent] = &warnings[..] else { panic!("two ranks") };
        assert!(silent.is_empty(), "{silent:?}");
        let [told] = &told[..] else { panic!("one warning is expected: {told:?}") };
        let expected =
            "no rank has written these averaged buffers, and they keep their values: own;";
        assert!(told.contains(expected), "{told}");
    }
}

/// No message more than without buffers: their words go with the statement.
#[test]
fn buffers_cost_no_exchange() {
    let calls = |spec: &ModelSpec, writes: fn(&mut Step<'_>, Batch) -> Result<(), Error>| {
        common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let options = ModelOptions::on(mesh(2, 2));
            let mut model = ShardedModel::new(world.clone(), spec.clone(), options, initial)?;
            let counted = || {
                let ledger = world.ledger();
                [Op::AllGather, Op::Broadcast].map(|op| ledger.op(Channel::Control, op).calls)
            };
            let before = counted();
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            writes(&mut step, Batch::of(rank, 0, 0))?;
            let _ = step.finish()?;
            Ok([before, counted()])
        }))
    };
    let without = calls(&three_units(), springs::microbatch);
    let with = calls(&spec(), |step, batch| microbatch(step, batch, [0.5, 0.5]));
    assert_eq!(with, without);
}

#[test]
fn ranks_that_write_differently_are_named() {
    let error = common_error(outcomes(3, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &ModelOptions::on(mesh(1, 3)))?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        microbatch(&mut step, Batch::of(rank, 0, 0), [rank as f32, 0.0])?;
        step.finish().map(drop)
    }));
    let told = error.to_string();
    let begin = "buffer mean, which the forward of step 0 has written: write values that are equal \
                 on all ranks, or declare it as averaged_buffer: its digest differs between ranks: \
                 rank 1 has 0x";
    assert!(told.starts_with(begin) && told.contains(", rank 0 has 0x"), "{told}");
}

/// A rank that had data and has not written is no rank without data: its values are not replaced in
/// silence.
#[test]
fn ranks_that_write_less_often_than_others_are_named() {
    for (name, place) in [("mean", 0), ("own", 1)] {
        let error = common_error(outcomes(2, |world| {
            let rank = world.rank().index();
            let mut model = model(world, &ModelOptions::on(mesh(1, 2)))?;
            let mut step = model.begin_step(StepOptions::microbatches(2))?;
            for index in 0..2 {
                let pass = step.microbatch()?;
                for (at, name) in ["mean", "own"].into_iter().enumerate() {
                    if rank == 0 || index == 0 || at != place {
                        let values = pass.handle().buffer(id(name))?;
                        pass.handle().write_buffer(id(name), &values)?;
                    }
                }
                springs::forward_and_backward(pass, Batch::of(rank, 0, index))?;
            }
            step.finish().map(drop)
        }));
        let expected = format!(
            "the number of microbatches of step 0 that have written buffer {name} differs between \
             ranks: rank 1 has 1, rank 0 has 2"
        );
        assert_eq!(error.to_string(), expected);
    }
}

/// A rank without data takes the values of those that have some, in one broadcast more.
#[test]
fn a_rank_that_is_out_of_data_takes_the_values_of_the_others() {
    let options = ModelOptions { uneven: Uneven::ZeroWeight, ..ModelOptions::on(mesh(2, 2)) };
    for begin in [StepOptions::microbatches(3), StepOptions::as_many_as_come()] {
        let brings = [1, 3, 0, 3];
        let found = common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut model = model(world, &options)?;
            let mut step = model.begin_step(begin)?;
            for index in 0..brings[rank] {
                microbatch(&mut step, Batch::of(rank, 0, index), [1.0, 1.0])?;
            }
            let _ = step.finish()?;
            buffers(&model)
        }));
        // Rank 2 has not written: the mean is that of 1, 3 and 3.
        assert_eq!(found, are(3.0, 7.0 / 3.0), "{begin:?}");
    }
}

#[test]
fn steps_that_do_not_count_leave_buffers_as_they_were() {
    let scaling = LossScaling::Dynamic(DynamicScale::default());
    let skipping = ModelOptions {
        loss_scaling: scaling,
        non_finite: NonFinite::Skip,
        ..ModelOptions::on(mesh(1, 2))
    };
    let found = common(on_ranks(2, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &skipping)?;
        // Rank 1 drops it.
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let written = microbatch(&mut step, Batch::of(rank, 0, 0), [1.0, 1.0]);
        match rank {
            1 => drop(step),
            _ => drop(written.and_then(|()| step.finish()).expect_err("rank 1 gives it up")),
        }
        // Skipped: the loss is not finite.
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let dropped = pass.handle().buffer(id("mean"))?;
        pass.handle().write_buffer(id("mean"), &[9.0; 3])?;
        let _ = pass.loss(LossSum::new(f64::INFINITY, 1))?;
        pass.finish()?;
        let gradients = step.finish()?;
        assert!(matches!(gradients.verdict(), Verdict::Skip(_)));
        let skipped = buffers(&model)?;
        // Counted, from the values before.
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        microbatch(&mut step, Batch::of(rank, 2, 0), [1.0, 1.0])?;
        let _ = step.finish()?;
        Ok((dropped, skipped, buffers(&model)?))
    }));
    assert_eq!(found, (vec![1.0, 2.0, 3.0], are(0.0, 0.0), are(1.0, 1.0)));
}

#[test]
fn writes_that_do_not_fit_are_refused() {
    let mut model = model(World::single(), &ModelOptions::on(mesh(1, 1))).expect("a model");
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    let handle = step.microbatch().expect("a microbatch").handle();
    let told = handle.write_buffer(id("mean"), &[1.0]).expect_err("one of three").to_string();
    assert_eq!(told, "write_buffer of mean on rank 0: got 1 elements, the plan has 3");
    drop(step);
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    let mut pass = step.microbatch().expect("a microbatch");
    let _ = pass.loss(LossSum::new(1.0, 1)).expect("a loss");
    let late = pass.handle().write_buffer(id("mean"), &[1.0; 3]).expect_err("it is too late");
    let expected = "mean is written after the loss: a buffer is written in the forward alone, and \
                    the second run of a recomputed unit would write it twice";
    assert!(late.to_string().contains(expected), "{late}");
    drop(pass);
    drop(step);
    let told = handle.write_buffer(id("mean"), &[1.0; 3]).expect_err("it is over").to_string();
    assert!(
        told.starts_with("write_buffer on rank 0: the handle belongs to microbatch 0"),
        "{told}"
    );
    let mut evaluation = model.evaluation().expect("an evaluation");
    let batch = evaluation.batch().expect("a batch");
    let handle = batch.handle();
    assert_eq!(handle.buffer(id("mean")).expect("it is read"), [1.0, 2.0, 3.0]);
    let told = handle.write_buffer(id("mean"), &[1.0; 3]).expect_err("it writes none").to_string();
    assert!(told.contains("an evaluation writes no buffer, and this one writes mean"), "{told}");
}

#[test]
fn a_write_that_is_refused_on_a_rank_is_told_to_the_others() {
    let told = outcomes(2, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let pass = step.microbatch()?;
        if rank == 1 {
            pass.handle().write_buffer(id("mean"), &[1.0])?;
        }
        springs::forward_and_backward(pass, Batch::of(rank, 0, 0))?;
        step.finish().map(drop)
    });
    let refused = "write_buffer of mean on rank 1: got 1 elements, the plan has 3";
    for error in told.into_iter().map(|it| it.expect_err("rank 1 has failed").to_string()) {
        assert!(error.contains(refused), "{error}");
    }
}
