//! Exponential moving averages of parameters and buffers: against their formula in f64, on meshes, beside
//! evaluations and in checkpoints.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use half::bf16;
use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Weights, export};
use hsdp::memory::{self, Category};
use hsdp::{
    AdamW, AdamWOptions, ByteCount, DType, Ema, Error, LossSum, ModelOptions, ModelSpec, NonFinite,
    Optimizer, Param, Precision, ShardedModel, StepOptions, Unit, Unused, Update, World,
};
use hsdp_checkpoint::{Disk, Folder, Store};
use hsdp_tests::support::models::partly_frozen;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};
use hsdp_tests::support::{slopes, springs};
use serde_json::json;

use crate::{alone, beside_others};

/// All elements of a model by name.
type Tensors = BTreeMap<String, Vec<f32>>;

const MESHES: [[usize; 2]; 3] = [[1, 1], [1, 4], [2, 2]];
const DECAY: f64 = 0.7;

/// The parameter that has no gradient in one of the steps, and that step.
const UNUSED: (&str, usize) = ("first.bias", 3);

fn model(world: World, [replicate, shard]: [usize; 2]) -> Result<ShardedModel, Error> {
    let options =
        ModelOptions { non_finite: NonFinite::Skip, ..ModelOptions::on(mesh(replicate, shard)) };
    springs::model_of(world, &partly_frozen(), &options)
}

fn adamw(model: &ShardedModel) -> AdamW {
    let options = AdamWOptions { learning_rate: 0.05, weight_decay: 0.3, ..Default::default() };
    AdamW::new(model, options)
}

/// A step whose gradients are the same for any number of ranks.
fn train(model: &mut ShardedModel, adamw: &mut AdamW, number: usize) -> Result<Update, Error> {
    let slope = [1.0, -0.5, 2.0, 0.25, -3.0, 1.5][number % 6];
    train_by(model, adamw, &|param| {
        let is_used = (&*param.name, number) != UNUSED;
        is_used.then_some(slope)
    })
}

fn train_by(
    model: &mut ShardedModel,
    adamw: &mut AdamW,
    slope: &dyn Fn(&Param) -> Option<f32>,
) -> Result<Update, Error> {
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    slopes::microbatch_by(&mut step, slope)?;
    let gradients = step.finish()?;
    adamw.step(model, gradients)
}

fn averages(model: &mut ShardedModel, ema: &Ema) -> Result<Tensors, Error> {
    model.with_shards(ema, |model| model.full_parameters())
}

fn is_trained(name: &str) -> bool {
    let spec = partly_frozen();
    spec.params()
        .any(|(_, param)| param.name == name && param.role == hsdp_sharding::Role::Trainable)
}

/// Parameters and averages before the first step and after each of six.
fn trace(sizes: [usize; 2]) -> Vec<[Tensors; 2]> {
    let ranks = sizes[0] * sizes[1];
    common(on_ranks(ranks, |world| {
        let mut model = model(world, sizes)?;
        let mut adamw = adamw(&model);
        let ema = Ema::new(&model, DECAY)?;
        let mut trace = vec![[model.full_parameters()?, averages(&mut model, &ema)?]];
        for number in 0..6 {
            assert_eq!(train(&mut model, &mut adamw, number)?, Update::Applied);
            trace.push([model.full_parameters()?, averages(&mut model, &ema)?]);
        }
        Ok(trace)
    }))
}

/// The formula of `get_ema_multi_avg_fn` in PyTorch 2.9, `torch/optim/swa_utils.py`, in f64. A step
/// rounds the factor, the difference, the product and the sum: each by at most 2^-24 of a value
/// below 3.
#[test]
fn the_average_follows_its_formula_with_the_same_bits_on_every_mesh() {
    let _turn = beside_others();
    let traces = MESHES.map(trace);
    assert!(traces.iter().all(|trace| *trace == traces[0]));
    for (name, initial) in &traces[0][0][0] {
        let mut exact: Vec<f64> = initial.iter().map(|value| f64::from(*value)).collect();
        for (steps, [parameters, averages]) in traces[0].iter().enumerate() {
            let now = &parameters[name];
            let average = &averages[name];
            if !is_trained(name) {
                assert_eq!([now, average], [initial; 2], "{name}");
                continue;
            }
            for ((exact, now), average) in exact.iter_mut().zip(now).zip(average) {
                *exact += (1.0 - DECAY) * (f64::from(*now) - *exact);
                assert!(average.abs() < 3.0 && now.abs() < 3.0);
                let bound = 4.0 * steps as f64 * 3.0 * 2.0_f64.powi(-24);
                let error = (f64::from(*average) - *exact).abs();
                assert!(error <= bound, "{name} after {steps} steps: {average}, not {exact}");
            }
        }
    }
}

#[test]
fn a_parameter_without_gradient_takes_part() {
    let _turn = beside_others();
    let trace = trace([2, 2]);
    let (name, step) = UNUSED;
    let [before, after] = [&trace[step], &trace[step + 1]];
    assert_eq!(before[0][name], after[0][name], "it has no gradient");
    assert_ne!(before[0]["first.weight"], after[0]["first.weight"]);
    for ((now, old), new) in after[0][name].iter().zip(&before[1][name]).zip(&after[1][name]) {
        let exact = f64::from(*old) + (1.0 - DECAY) * f64::from(now - old);
        assert!(*new != *old && (f64::from(*new) - exact).abs() < 1e-6, "{old}, {new}, {now}");
    }
}

#[test]
fn a_skipped_step_changes_no_average() {
    let _turn = beside_others();
    on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = model(world, [2, 2])?;
        let mut adamw = adamw(&model);
        let ema = Ema::new(&model, DECAY)?;
        train(&mut model, &mut adamw, 0)?;
        let before = averages(&mut model, &ema)?;
        let slope = if rank == 2 { f32::NAN } else { 1.0 };
        let skipped = train_by(&mut model, &mut adamw, &|_| Some(slope))?;
        assert!(matches!(skipped, Update::Skipped(_)));
        assert_eq!(averages(&mut model, &ema)?, before);
        train(&mut model, &mut adamw, 1)?;
        assert_ne!(averages(&mut model, &ema)?, before);
        Ok(())
    });
}

/// The parameters that a forward sees.
fn evaluated(model: &mut ShardedModel) -> Result<Tensors, Error> {
    let spec: ModelSpec = model.plan().spec().clone();
    let mut seen = Tensors::new();
    let mut evaluation = model.evaluation()?;
    let mut pass = evaluation.batch()?;
    for unit in spec.unit_ids() {
        let full = pass.unshard(unit)?;
        let params = spec[unit].params.iter().enumerate();
        seen.extend(params.map(|(index, it)| (it.name.clone(), full.values(index).to_f32())));
    }
    pass.finish()?;
    evaluation.finish()?;
    Ok(seen)
}

#[test]
fn an_evaluation_sees_the_averages_in_the_compute_dtype_and_then_the_parameters_again() {
    let _turn = beside_others();
    on_ranks(4, |world| {
        let precision = Precision { parameters: DType::BF16, ..Precision::default() };
        let options = ModelOptions { precision, ..ModelOptions::on(mesh(2, 2)) };
        let mut model = springs::model_of(world, &partly_frozen(), &options)?;
        let mut adamw = adamw(&model);
        let ema = Ema::new(&model, DECAY)?;
        for number in 0..2 {
            train(&mut model, &mut adamw, number)?;
        }
        let [own, seen] = [model.full_parameters()?, evaluated(&mut model)?];
        let averages = averages(&mut model, &ema)?;
        let in_bf16 = averages.iter().map(|(name, values)| {
            (name.clone(), values.iter().map(|it| bf16::from_f32(*it).to_f32()).collect())
        });
        assert_eq!(model.with_shards(&ema, evaluated)?, in_bf16.collect());
        assert_ne!(averages, own);
        assert_eq!([model.full_parameters()?, evaluated(&mut model)?], [own, seen]);
        Ok(())
    });
}

#[test]
fn the_parameters_are_back_after_an_error_and_a_panic() {
    let _turn = beside_others();
    on_ranks(2, |world| {
        let mut model = model(world, [1, 2])?;
        let mut adamw = adamw(&model);
        let ema = Ema::new(&model, DECAY)?;
        train(&mut model, &mut adamw, 0)?;
        let own = model.full_parameters()?;
        let failed = model.with_shards(&ema, |_| {
            Err::<(), _>(Error::Options { what: "of the closure".to_owned() })
        });
        assert!(failed.is_err_and(|error| error.to_string().contains("of the closure")));
        assert_eq!(model.full_parameters()?, own);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            model.with_shards(&ema, |_| -> Result<(), Error> { panic!("of the closure") })
        }));
        assert!(panicked.is_err());
        assert_eq!(model.full_parameters()?, own);
        train(&mut model, &mut adamw, 1)?;
        assert_ne!(model.full_parameters()?, own);
        Ok(())
    });
}

/// The text of a refusal.
fn refused<T>(outcome: Result<T, Error>) -> String {
    match outcome.map(drop) {
        Err(error @ Error::Misuse { .. }) => error.to_string(),
        other => panic!("no misuse: {other:?}"),
    }
}

#[test]
fn training_and_saving_inside_are_refused() {
    let _turn = beside_others();
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let mut model = model(world, [1, 2])?;
        let mut adamw = adamw(&model);
        let ema = Ema::new(&model, DECAY)?;
        let mut checkpoints =
            Checkpoints::open(&model, folder.path(), CheckpointOptions::default())?;
        train(&mut model, &mut adamw, 0)?;
        let own = model.full_parameters()?;
        let inside = model.with_shards(&ema, |model| {
            Ok::<_, Error>([
                refused(train(model, &mut adamw, 1)),
                refused(checkpoints.save(model, &adamw, &json!(null))),
                refused(checkpoints.load_latest(model, &mut adamw)),
                refused(Ema::new(model, DECAY)),
                refused(averages(model, &ema)),
            ])
        })?;
        for text in inside {
            assert!(
                text.contains("inside with_shards the model has averaged parameters"),
                "{text}"
            );
        }
        assert_eq!(model.full_parameters()?, own);
        train(&mut model, &mut adamw, 1).map(drop)
    });
}

#[test]
fn averages_are_evaluated_between_steps_and_by_their_own_model() {
    let _turn = beside_others();
    on_ranks(2, |world| {
        let mut model = model(world.clone(), [1, 2])?;
        let ema = Ema::new(&model, DECAY)?;
        let mut other = self::model(world, [1, 2])?;
        let text = refused(averages(&mut other, &ema));
        assert!(text.contains("the average is of another model"), "{text}");
        let gradients = slopes::gradients(&mut model, 1.0)?;
        let text = refused(averages(&mut model, &ema));
        assert!(text.contains("a step is under way, or its gradients still exist"), "{text}");
        drop(gradients);
        averages(&mut model, &ema).map(drop)
    });
}

#[test]
fn a_decay_is_a_fraction_and_the_same_on_all_ranks() {
    let _turn = beside_others();
    for decay in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
        let error = on_ranks(1, |world| Ok(Ema::new(&model(world, [1, 1])?, decay).map(drop)));
        let text = error[0].as_ref().expect_err("it is refused").to_string();
        assert!(text.contains(&format!("ema decay {decay:?}: it must be 0 or more, and below 1")));
    }
    let error = common_error(outcomes(2, |world| {
        let decay = [0.5, 0.25][world.rank().index()];
        let mut model = model(world, [1, 2])?;
        let mut adamw = adamw(&model);
        let _ema = Ema::new(&model, decay)?;
        train(&mut model, &mut adamw, 0)?;
        train(&mut model, &mut adamw, 1)
    }));
    let text = error.to_string();
    assert!(matches!(error, Error::Disagreement { .. }), "{text}");
    assert!(text.contains("ema decay 0.5") && text.contains("ema decay 0.25"), "{text}");
}

/// An average that exists on one rank alone would be a line that the other rank does not have.
#[test]
fn a_dropped_average_leaves_no_trace_in_an_update() {
    let _turn = beside_others();
    on_ranks(2, |world| {
        let rank = world.rank().index();
        let mut model = model(world, [1, 2])?;
        let mut adamw = adamw(&model);
        if rank == 0 {
            drop(Ema::new(&model, DECAY)?);
        }
        train(&mut model, &mut adamw, 0)?;
        train(&mut model, &mut adamw, 1)?;
        model.end_run()
    });
}

#[test]
fn an_average_takes_four_bytes_for_each_element_of_the_trained_shard() {
    let _turn = alone();
    on_ranks(4, |world| {
        let rank = world.rank();
        let model = model(world, [2, 2])?;
        let live = || memory::usage(rank, Category::Optimizer).live.0;
        let before = live();
        let ema = Ema::new(&model, DECAY)?;
        let trained = model.plan().layouts().iter().map(|it| it.trainable().shard_len as u64);
        assert_eq!(live() - before, 4 * trained.sum::<u64>());
        drop(ema);
        assert_eq!(live(), before);
        Ok(())
    });
}

/// The bytes of state of each rank, as planned, and as measured after two steps: the peak, and what
/// is left.
fn state(sizes: [usize; 2], averages: usize) -> Vec<[ByteCount; 3]> {
    memory::reset_peaks();
    on_ranks(sizes[0] * sizes[1], |world| {
        let rank = world.rank();
        let spec = (0..averages).fold(partly_frozen(), |spec, _| spec.averaged());
        let options = ModelOptions::on(mesh(sizes[0], sizes[1]));
        let mut model = springs::model_of(world, &spec, &options)?;
        let _kept: Vec<Ema> =
            (0..averages).map(|_| Ema::new(&model, DECAY)).collect::<Result<_, _>>()?;
        let mut adamw = adamw(&model);
        train(&mut model, &mut adamw, 0)?;
        train(&mut model, &mut adamw, 1)?;
        let usage = memory::usage(rank, Category::Optimizer);
        let plan = model.plan();
        assert!(plan.optimizer_state(rank) <= plan.memory().optimizer, "no rank has more");
        Ok([plan.optimizer_state(rank), usage.peak, usage.live])
    })
}

#[test]
fn the_plan_says_how_much_state_and_averages_take() {
    let _turn = alone();
    for sizes in MESHES {
        let mut before = vec![ByteCount::ZERO; sizes[0] * sizes[1]];
        for averages in 0..3 {
            for (rank, [planned, peak, live]) in state(sizes, averages).into_iter().enumerate() {
                assert_eq!([peak, live], [planned; 2], "{averages} on {sizes:?}, rank {rank}");
                assert!(planned > before[rank], "an average takes memory on rank {rank}");
                before[rank] = planned;
            }
        }
    }
}

/// Loads the newest checkpoint of a folder, if there is one, trains to a step, and saves in the
/// background.
fn go(folder: &Path, sizes: [usize; 2], until: usize) -> Tensors {
    common(on_ranks(sizes[0] * sizes[1], |world| {
        let mut model = model(world, sizes)?;
        let mut both = (adamw(&model), Ema::new(&model, DECAY)?);
        let mut checkpoints = Checkpoints::open(&model, folder, CheckpointOptions::default())?;
        checkpoints.load_latest(&mut model, &mut both)?;
        let begin = usize::try_from(model.committed_steps()).expect("a few");
        for number in begin..until {
            train(&mut model, &mut both.0, number)?;
        }
        if begin == 0 {
            checkpoints.save(&model, &both, &json!(null))?;
        } else if until > begin {
            checkpoints.save_in_background(&model, &both, &json!(null))?;
            checkpoints.finish(&model)?;
        }
        averages(&mut model, &both.1)
    }))
}

#[test]
fn a_checkpoint_has_the_averages_for_any_mesh() {
    let _turn = beside_others();
    let folder = tempfile::tempdir().expect("a folder");
    let trace = trace([1, 1]);
    assert_eq!(go(folder.path(), [1, 4], 2), trace[2][1]);
    assert_eq!(go(folder.path(), [2, 2], 2), trace[2][1], "loaded");
    assert_eq!(go(folder.path(), [2, 2], 4), trace[4][1], "trained on");
    assert_eq!(go(folder.path(), [1, 1], 6), trace[6][1], "from a save in the background");
    let store = Store::new(folder.path(), Arc::new(Disk));
    let generation = store.latest().expect("readable").expect("there is one");
    let head = generation.manifest().optimizer.clone().expect("it has an optimizer");
    assert_eq!((&*head.kind, &head.options[1]), ("adamw+ema", &json!({ "decay": DECAY })));
}

#[test]
fn an_export_has_the_averages_and_the_frozen_parameters() {
    let _turn = beside_others();
    let folder = tempfile::tempdir().expect("a folder");
    let saved = folder.path().join("run");
    let expected = go(&saved, [2, 2], 3);
    let store = Store::new(&saved, Arc::new(Disk));
    let generation = store.latest().expect("readable").expect("there is one");
    let out = folder.path().join("model");
    export(&generation, &Disk, &out, Weights::Average, u64::MAX).expect("exported");
    let exported = Folder::open(Arc::new(Disk), &out).expect("a folder");
    assert_eq!(exported.tensors().count(), expected.len());
    for (_, param) in partly_frozen().params() {
        let values = exported.read_whole(&param.name, &param.shape).expect("it is there");
        assert_eq!(values, expected[&param.name], "{}", param.name);
    }
}

/// Adds a unit with a buffer of each rule.
fn with_buffers() -> ModelSpec {
    let norm = Unit::new("bn")
        .param(Param::new("bn.weight", [3]))
        .param(Param::new("bn.mean", [3]).buffer())
        .param(Param::new("bn.own", [2]).averaged_buffer());
    partly_frozen().unit(norm)
}

/// Makes a step that writes both buffers. Returns its update.
fn train_buffers(
    model: &mut ShardedModel,
    adamw: &mut AdamW,
    factor: f64,
) -> Result<Update, Error> {
    let number = model.committed_steps() as f32;
    let spec = model.plan().spec().clone();
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let mut pass = step.microbatch()?;
    let handle = pass.handle();
    for (id, _) in spec.buffers() {
        let write = |value: &f32| 0.9 * value + (3.0 * number).sin();
        let values: Vec<f32> = handle.buffer(id)?.iter().map(write).collect();
        handle.write_buffer(id, &values)?;
    }
    let _ = pass.loss(LossSum::new(factor, 1))?;
    pass.finish()?;
    let gradients = step.finish()?;
    adamw.step(model, gradients)
}

fn buffered(world: World, [replicate, shard]: [usize; 2]) -> Result<ShardedModel, Error> {
    let unused = Unused::Zeros;
    let non_finite = NonFinite::Skip;
    let options = ModelOptions { unused, non_finite, ..ModelOptions::on(mesh(replicate, shard)) };
    springs::model_of(world, &with_buffers(), &options)
}

/// The buffers of a model, by name.
fn buffers(model: &ShardedModel) -> Tensors {
    let names = with_buffers().buffers().map(|(_, it)| it.name.clone()).collect::<Vec<_>>();
    let value = |name: String| (name.clone(), model.buffer(&name).expect("it is declared"));
    names.into_iter().map(value).collect()
}

/// Buffers and their averages before the first step and after each of six; the fourth is skipped.
fn buffer_trace(sizes: [usize; 2]) -> Vec<[Tensors; 2]> {
    common(on_ranks(sizes[0] * sizes[1], |world| {
        let mut model = buffered(world, sizes)?;
        let mut adamw = adamw(&model);
        let ema = Ema::new(&model, DECAY)?;
        let mut trace = Vec::new();
        for number in 0..=6 {
            let averages = model.with_shards(&ema, |model| Ok::<_, Error>(buffers(model)))?;
            trace.push([buffers(&model), averages]);
            let factor = if number == 3 { f64::NAN } else { 1.0 };
            let update = train_buffers(&mut model, &mut adamw, factor)?;
            assert_eq!(matches!(update, Update::Skipped(_)), number == 3);
        }
        Ok(trace)
    }))
}

/// A plain loop in f64, with the bound of the parameters: buffers stay below 11 here.
#[test]
fn the_averages_of_buffers_follow_the_formula_with_the_same_bits_on_every_mesh() {
    let _turn = beside_others();
    let traces = MESHES.map(buffer_trace);
    assert!(traces.iter().all(|trace| *trace == traces[0]));
    let trace = &traces[0];
    assert_eq!(trace[3], trace[4], "a skipped step changes nothing");
    for (name, initial) in &trace[0][0] {
        let mut exact: Vec<f64> = initial.iter().map(|value| f64::from(*value)).collect();
        for (steps, [now, averages]) in trace.iter().enumerate() {
            let mut moved = false;
            for ((exact, now), average) in exact.iter_mut().zip(&now[name]).zip(&averages[name]) {
                if steps != 4 {
                    *exact += (1.0 - DECAY) * (f64::from(*now) - *exact);
                }
                let bound = 4.0 * steps as f64 * 11.0 * 2.0_f64.powi(-24);
                let error = (f64::from(*average) - *exact).abs();
                assert!(error <= bound, "{name} after {steps} steps: {average}, not {exact}");
                moved |= now != average;
            }
            assert_eq!(moved, steps > 0, "{name}");
        }
    }
}

#[test]
fn an_evaluation_sees_the_averages_of_buffers_and_then_the_buffers_again() {
    let _turn = beside_others();
    on_ranks(4, |world| {
        let mut model = buffered(world, [2, 2])?;
        let mut adamw = adamw(&model);
        let ema = Ema::new(&model, DECAY)?;
        for _ in 0..2 {
            train_buffers(&mut model, &mut adamw, 1.0)?;
        }
        let seen = |model: &mut ShardedModel| -> Result<[Tensors; 3], Error> {
            let mut evaluation = model.evaluation()?;
            let pass = evaluation.batch()?;
            let handle = pass.handle();
            let read = |(id, buffer): (_, &Param)| Ok((buffer.name.clone(), handle.buffer(id)?));
            let read = with_buffers().buffers().map(read).collect::<Result<Tensors, Error>>()?;
            pass.finish()?;
            evaluation.finish()?;
            let mut full = model.full_parameters()?;
            full.retain(|name, _| read.contains_key(name));
            Ok([read, full, buffers(model)])
        };
        let own = seen(&mut model)?;
        let averages = model.with_shards(&ema, seen)?;
        assert!(own.iter().all(|it| *it == own[0]) && averages.iter().all(|it| *it == averages[0]));
        assert_ne!(own[0], averages[0]);
        assert_eq!(seen(&mut model)?, own);
        let failed = model.with_shards(&ema, |_| {
            Err::<(), _>(Error::Options { what: "of the closure".to_owned() })
        });
        assert!(failed.is_err());
        assert_eq!(seen(&mut model)?, own);
        Ok(())
    });
}
