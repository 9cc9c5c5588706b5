//! Losses across models: the backward of a pass goes through the units of another model, which takes
//! part by an evaluation with a backward. Losses and parameters are those of plain candle.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor, Var};
use hsdp::{
    Error as RuntimeError, Evaluation, Mesh, ModelOptions, ModelSpec, Optimizer as _, Param,
    Precision, Sgd, SgdOptions, StepOptions, Unit, Unused, World,
};
use hsdp_candle::{Error, LostGradients, Parameters, Pass, Plain, UnitsExt};
use hsdp_sharding::Role;

use crate::common::{
    self, Named, Runner, input, layer, layer_unit, layers, loss_of_layers, sharded, sharded_with,
    values, words,
};

const MESHES: [&str; 3] = ["1x1", "2x2", "1x4"];
const STEPS: usize = 3;
const LEARNING_RATE: f32 = 0.2;

type Make = fn(Runner<'_>, &Tensor) -> Result<Vec<Tensor>>;
type Teach = fn(Runner<'_>, &Tensor) -> Result<Tensor>;
type Criticize = fn(Runner<'_>, &Tensor, &[Tensor]) -> Result<Tensor>;
type Judge = fn([Runner<'_>; 2], &[Tensor], Option<&Tensor>) -> Result<Tensor>;

/// Two models. The first one is trained on a loss that the second one computes.
#[derive(Clone)]
struct Models {
    trained: ModelSpec,
    other: ModelSpec,
    /// Runs the trained model on a batch. The outputs enter the loss.
    make: Make,
    /// Runs the other model on the batch beforehand, as a teacher.
    teach: Option<Teach>,
    /// Computes the loss of the other model in a step of its own, as that of a critic, from the
    /// batch and the outputs without a history.
    criticize: Option<Criticize>,
    /// Computes the loss, by units of both models, from the outputs and what was taught.
    judge: Judge,
    /// The weight of a rank's loss in a step.
    weight: fn(usize, usize) -> u64,
}

/// The batch of a rank; numbers that must not count, if the rank has none.
fn batch(step: usize, rank: usize, weight: u64) -> Tensor {
    let batch = input(rank + 5 * step, 3, 4);
    if weight > 0 { batch } else { (batch * f64::NAN).expect("a product") }
}

/// The mean losses of a step: of the trained model, and of the other one if it has a step.
#[derive(Debug, Default)]
struct Losses(Vec<[f64; 2]>);

/// A loss of a rank, with its weight and the gradients of all parameters that are trained.
struct Part {
    weight: u64,
    loss: f64,
    gradients: Named,
}

fn part(plain: &Plain, spec: &ModelSpec, loss: &Tensor, weight: u64) -> Part {
    let gradients = loss.backward().expect("plain candle");
    let of = |(name, var): (&String, &Var)| {
        let is_trained =
            spec.params().any(|(_, it)| it.name == *name && it.role == Role::Trainable);
        let gradient = gradients.get(var).filter(|_| is_trained)?;
        let flat = gradient.to_dtype(DType::F32).and_then(|it| it.flatten_all()?.to_vec1::<f32>());
        Some((name.clone(), flat.expect("a gradient of floats")))
    };
    let gradients = plain.parameters().iter().filter_map(of).collect();
    let loss = loss.to_dtype(DType::F64).and_then(|it| it.to_scalar::<f64>()).expect("a scalar");
    Part { weight, loss, gradients }
}

/// Updates parameters by the mean gradient over all items, and returns the mean loss.
#[expect(clippy::cast_possible_truncation, reason = "the one rounding of a gradient, to f32")]
fn update(all: &mut Named, parts: &[Part]) -> f64 {
    let parts: Vec<&Part> = parts.iter().filter(|part| part.weight > 0).collect();
    let items = parts.iter().map(|part| part.weight).sum::<u64>() as f64;
    for (name, values) in all {
        for (index, value) in values.iter_mut().enumerate() {
            let of_rank = |part: &&Part| {
                part.gradients.get(name).map_or(0.0, |it| f64::from(it[index])) * part.weight as f64
            };
            let gradient = parts.iter().map(of_rank).sum::<f64>() / items;
            *value -= LEARNING_RATE * gradient as f32;
        }
    }
    parts.iter().map(|part| part.loss * part.weight as f64).sum::<f64>() / items
}

/// The losses, and the parameters of both models after the last step, in plain candle.
fn trained_by_candle(models: &Models, mesh: Mesh) -> (Losses, [Named; 2]) {
    let named = |spec: &ModelSpec| -> Named {
        spec.params().map(|(_, it)| (it.name.clone(), values(it))).collect()
    };
    let plain = |spec: &ModelSpec, all: &Named| {
        Plain::new(spec.clone(), all, Precision::default()).expect("values for all")
    };
    let mut all = [named(&models.trained), named(&models.other)];
    let mut losses = Losses::default();
    for step in 0..STEPS {
        let batches: Vec<(Tensor, u64)> = (0..mesh.world_size())
            .map(|rank| {
                let weight = (models.weight)(step, rank);
                (batch(step, rank, weight), weight)
            })
            .collect();
        let mut of_step = [0.0; 2];
        let trained = plain(&models.trained, &all[0]);
        let run = Runner { units: &trained, recomputed: false };
        if let Some(criticize) = models.criticize {
            let other = plain(&models.other, &all[1]);
            let parts: Vec<Part> = batches
                .iter()
                .map(|(batch, weight)| {
                    let made = (models.make)(run, batch).expect("a forward");
                    let made: Vec<_> = made.iter().map(Tensor::detach).collect();
                    let run = Runner { units: &other, recomputed: false };
                    let loss = criticize(run, batch, &made).expect("a forward");
                    part(&other, &models.other, &loss, *weight)
                })
                .collect();
            of_step[1] = update(&mut all[1], &parts);
        }
        let other = plain(&models.other, &all[1]);
        let parts: Vec<Part> = batches
            .iter()
            .map(|(batch, weight)| {
                let runs = [run, Runner { units: &other, recomputed: false }];
                let taught = models.teach.map(|teach| teach(runs[1], batch).expect("a forward"));
                let taught = taught.map(|it| it.detach());
                let made = (models.make)(run, batch).expect("a forward");
                let loss = (models.judge)(runs, &made, taught.as_ref()).expect("a forward");
                part(&trained, &models.trained, &loss, *weight)
            })
            .collect();
        of_step[0] = update(&mut all[0], &parts);
        losses.0.push(of_step);
    }
    (losses, all)
}

/// Runs a teacher in a plain evaluation.
fn taught(
    mut evaluation: Evaluation<'_>,
    recomputed: bool,
    teach: impl Fn(Runner<'_>) -> Result<Tensor>,
) -> std::result::Result<Tensor, Error> {
    let pass = Pass::new(evaluation.batch()?)?;
    let output = teach(Runner { units: &pass, recomputed })?;
    pass.finish()?;
    evaluation.finish()?;
    Ok(output)
}

/// The losses, and the parameters of both models after the last step, on one rank of a mesh.
fn trained(
    world: World,
    models: &Models,
    mesh: Mesh,
    recomputed: bool,
) -> std::result::Result<(Losses, [Named; 2]), Error> {
    let rank = world.rank().index();
    let options = || ModelOptions { unused: Unused::Zeros, ..ModelOptions::on(mesh) };
    let mut model = sharded_with(world.clone(), models.trained.clone(), options());
    let mut other = sharded_with(world, models.other.clone(), options());
    let sgd = SgdOptions { learning_rate: LEARNING_RATE.into(), ..SgdOptions::default() };
    let mut optimizers = [Sgd::new(&model, sgd), Sgd::new(&other, sgd)];
    let mut losses = Losses::default();
    for step in 0..STEPS {
        let mut of_step = [0.0; 2];
        let weight = (models.weight)(step, rank);
        let batch = batch(step, rank, weight);
        let taught = match models.teach {
            Some(teach) => Some(taught(other.evaluation()?, recomputed, |run| teach(run, &batch))?),
            None => None,
        };
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let pass = Pass::new(step.microbatch()?)?;
        let run = Runner { units: &pass, recomputed };
        let made = (models.make)(run, &batch)?;
        if let Some(criticize) = models.criticize {
            // A step of the other model within that of the trained one.
            let mut step = other.begin_step(StepOptions::microbatches(1))?;
            let pass = Pass::new(step.microbatch()?)?;
            let made: Vec<_> = made.iter().map(Tensor::detach).collect();
            let loss = criticize(Runner { units: &pass, recomputed }, &batch, &made)?;
            pass.backward(&loss, weight)?;
            let gradients = step.finish()?;
            of_step[1] = gradients.loss();
            optimizers[1].step(&mut other, gradients)?;
        }
        let mut evaluation = other.evaluation_with_backward()?;
        let of_other = Pass::new(evaluation.batch()?)?;
        let runs = [run, Runner { units: &of_other, recomputed }];
        let loss = (models.judge)(runs, &made, taught.as_ref())?;
        pass.backward(&loss, weight)?;
        of_other.finish()?;
        evaluation.finish()?;
        let gradients = step.finish()?;
        of_step[0] = gradients.loss();
        optimizers[0].step(&mut model, gradients)?;
        losses.0.push(of_step);
    }
    Ok((losses, [model.full_parameters()?, other.full_parameters()?]))
}

#[track_caller]
fn assert_near(got: f64, want: f64, what: &dyn std::fmt::Debug) {
    assert!((got - want).abs() <= 1e-6, "{what:?}: {got}, not {want}");
}

/// Checks that the models train as in plain candle on these meshes, recomputed or not.
#[track_caller]
fn assert_as_in_candle(models: &Models, meshes: &[&str]) {
    for (mesh, recomputed) in meshes.iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        let what = (mesh, recomputed);
        let mesh: Mesh = mesh.parse().expect("a mesh");
        let (want_losses, want) = trained_by_candle(models, mesh);
        assert!(
            (want_losses.0[0][0] - want_losses.0[STEPS - 1][0]).abs() > 1e-4,
            "{want_losses:?}"
        );
        let ranks = common::results(mesh.world_size(), |world| {
            trained(world, models, mesh, recomputed).expect("three steps")
        });
        for (losses, got) in ranks {
            for (got, want) in losses.0.iter().flatten().zip(want_losses.0.iter().flatten()) {
                assert_near(*got, *want, &what);
            }
            for (got, want) in got.iter().zip(&want) {
                assert_eq!(got.len(), want.len());
                for (name, values) in want {
                    assert_eq!(got[name].len(), values.len());
                    for (got, want) in got[name].iter().zip(values) {
                        assert_near(f64::from(*got), f64::from(*want), &(what, name));
                    }
                }
            }
        }
    }
}

fn dense(name: &str, shape: [usize; 2]) -> Unit {
    Unit::new(name).param(Param::new(format!("{name}.weight"), shape))
}

/// The tanh of a product in the dtype of the unit, which no tensor between the units shows.
fn run_dense(run: Runner<'_>, name: &'static str, x: &Tensor) -> Result<Tensor> {
    run.run(name, x, move |p, x| {
        x.matmul(&p.get(&format!("{name}.weight"))?)?.tanh()?.to_dtype(DType::F32)
    })
}

fn frozen(spec: &ModelSpec) -> ModelSpec {
    spec.units().iter().cloned().fold(ModelSpec::new(), |spec, mut unit| {
        unit.params = unit.params.into_iter().map(Param::frozen).collect();
        spec.unit(unit)
    })
}

fn generator() -> ModelSpec {
    ModelSpec::new().unit(dense("make.0", [4, 5])).unit(dense("make.1", [5, 4]))
}

fn generate(run: Runner<'_>, x: &Tensor) -> Result<Vec<Tensor>> {
    let x = run_dense(run, "make.0", x)?;
    Ok(vec![run_dense(run, "make.1", &x)?])
}

fn critic() -> ModelSpec {
    ModelSpec::new()
        .unit(dense("judge.0", [4, 6]))
        .unit(dense("judge.1", [6, 6]).keep())
        .unit(dense("judge.2", [6, 1]))
}

fn score(run: Runner<'_>, x: &Tensor) -> Result<Tensor> {
    let x = run_dense(run, "judge.0", x)?;
    let x = run_dense(run, "judge.1", &x)?;
    run_dense(run, "judge.2", &run_dense(run, "judge.1", &x)?)
}

fn gan() -> Models {
    Models {
        trained: generator(),
        other: critic(),
        make: generate,
        teach: None,
        criticize: Some(|run, real, made| {
            let scores = score(run, &Tensor::cat(&[real, &made[0]], 0)?)?;
            let of_real = (scores.narrow(0, 0, 3)? - 1.0)?.sqr()?.mean_all()?;
            of_real + scores.narrow(0, 3, 3)?.sqr()?.mean_all()?
        }),
        judge: |[_, critic], made, _| (score(critic, &made[0])? - 1.0)?.sqr()?.mean_all(),
        weight: |_, _| 1,
    }
}

#[test]
fn a_generator_and_a_critic_train_against_each_other() {
    assert_as_in_candle(&gan(), &MESHES);
}

/// Rank 1 has fewer items than the others, and from the second step on it has none: it runs forward
/// and backward on any input.
#[test]
fn a_rank_without_items_takes_part_with_a_loss_without_weight() {
    let weight = |step: usize, rank: usize| match (step, rank) {
        (0, 1) => 2,
        (_, 1) => 0,
        _ => 3,
    };
    assert_as_in_candle(&Models { weight, ..gan() }, &MESHES[1..]);
}

/// The seed of these weights is no power of two, and must not be rounded to 16 bits.
#[test]
fn a_critic_in_16_bits_rounds_no_seed() {
    for dtype in [hsdp::DType::BF16, hsdp::DType::F16] {
        let [first, kept, last] = [0, 1, 2].map(|at| critic().units()[at].clone());
        let other = [first, kept.compute_in(dtype), last].into_iter();
        let other = frozen(&other.fold(ModelSpec::new(), ModelSpec::unit));
        let weight = |_: usize, rank: usize| 3 + rank as u64;
        assert_as_in_candle(&Models { other, criticize: None, weight, ..gan() }, &MESHES);
    }
}

/// The features of a frozen net, between units of the trained model.
#[test]
fn a_frozen_net_gives_a_perceptual_loss() {
    let net = frozen(&ModelSpec::new().unit(dense("net.0", [4, 6])).unit(dense("net.1", [6, 5])));
    let models = Models {
        trained: generator().unit(dense("head", [5, 3])),
        other: net,
        make: generate,
        teach: Some(|net, x| run_dense(net, "net.1", &run_dense(net, "net.0", x)?)),
        criticize: None,
        judge: |[model, net], made, wanted| {
            let features = run_dense(net, "net.1", &run_dense(net, "net.0", &made[0])?)?;
            let far = (&features - wanted.expect("features of the input"))?.sqr()?.mean_all()?;
            far + run_dense(model, "head", &features)?.sqr()?.mean_all()?
        },
        weight: |_, _| 1,
    };
    assert_as_in_candle(&models, &MESHES);
}

/// The logits of the teacher are the targets of the student's, and a block of the teacher continues
/// from the student's hidden state.
#[test]
fn a_student_learns_from_a_teacher_and_through_its_block() {
    let teacher = ModelSpec::new().unit(dense("below", [4, 5])).unit(dense("above", [5, 3]));
    fn run_teacher(run: Runner<'_>, x: &Tensor) -> Result<Tensor> {
        run_dense(run, "above", &run_dense(run, "below", x)?)
    }
    let student = ModelSpec::new().unit(dense("hidden", [4, 5])).unit(dense("logits", [5, 3]));
    let models = Models {
        trained: student,
        other: teacher,
        make: |run, x| {
            let hidden = run_dense(run, "hidden", x)?;
            let logits = run_dense(run, "logits", &hidden)?;
            Ok(vec![hidden, logits])
        },
        teach: Some(run_teacher),
        criticize: None,
        judge: |[_, teacher], made, targets| {
            let targets = targets.expect("logits of the teacher");
            let through = run_dense(teacher, "above", &made[0])?;
            (&made[1] - targets)?.sqr()?.mean_all()? + (through - targets)?.sqr()?.mean_all()?
        },
        weight: |_, _| 1,
    };
    assert_as_in_candle(&models, &MESHES);
}

fn two_shards() -> Mesh {
    Mesh::new(1, 2).expect("two shards")
}

/// The units of the critic are gathered again, last unit first, and freed. Nothing of it is reduced.
#[test]
fn a_critic_is_gathered_twice_and_reduces_nothing() {
    for recomputed in [false, true] {
        let events = common::results(2, |world| -> std::result::Result<_, Error> {
            let mut model = sharded(world.clone(), layers(1, 4), two_shards());
            let mut critic = sharded(world, layers(3, 4), two_shards());
            critic.record_events();
            let mut step = model.begin_step(StepOptions::microbatches(2))?;
            let mut evaluation = critic.evaluation_with_backward()?;
            for _ in 0..2 {
                let pass = Pass::new(step.microbatch()?)?;
                let of_critic = Pass::new(evaluation.batch()?)?;
                let run = Runner { units: &of_critic, recomputed };
                let mut x = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
                for index in 0..3 {
                    x = run.layer(index, &x)?;
                    assert!(x.track_op());
                }
                pass.backward(&x.sqr()?.mean_all()?, 1)?;
                of_critic.finish()?;
            }
            evaluation.finish()?;
            let norm = step.finish()?.norm();
            assert!(norm > 0.0);
            Ok(critic.take_events())
        });
        let batch = |forward: [usize; 3]| {
            let of = |unit: usize, phase: &str| format!("gather {unit} {phase}");
            let forward = forward.into_iter();
            let backward = forward.clone().rev().map(move |unit| of(unit, "backward"));
            forward.map(move |unit| of(unit, "forward")).chain(backward).collect::<Vec<_>>()
        };
        for events in events {
            let words = words(&events.expect("an evaluation"));
            assert_eq!(words, [batch([0, 1, 2]), batch([0, 1, 2])].concat(), "{recomputed}");
        }
    }
}

/// An input that is no parameter of any model gets its gradient through the critic.
#[test]
fn the_gradient_of_an_input_comes_through_a_critic() {
    let plain = Plain::new(
        layers(2, 4),
        &layers(2, 4)
            .params()
            .map(|(_, it)| (it.name.clone(), values(it)))
            .collect::<BTreeMap<_, _>>(),
        Precision::default(),
    )
    .expect("values for all");
    let x = Var::from_tensor(&input(0, 3, 4)).expect("a variable");
    let loss = loss_of_layers(&plain, 2, &x).expect("a forward");
    let want = loss.backward().expect("plain candle").get(&x).expect("a gradient").to_vec2::<f32>();
    let want = want.expect("a matrix");
    for recomputed in [false, true] {
        let got = common::results(2, |world| -> std::result::Result<_, Error> {
            let mut model = sharded(world.clone(), layers(1, 4), two_shards());
            let mut critic = sharded(world, layers(2, 4), two_shards());
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let mut evaluation = critic.evaluation_with_backward()?;
            let pass = Pass::new(step.microbatch()?)?;
            let of_critic = Pass::new(evaluation.batch()?)?;
            let x = Var::from_tensor(&input(0, 3, 4))?;
            let gradient = pass.gradient_of(&x);
            let run = Runner { units: &of_critic, recomputed };
            let y = run.layer(1, &run.layer(0, &x)?)?;
            let own = loss_of_layers(&pass, 1, &input(1, 3, 4))?;
            pass.backward(&(y.sqr()?.mean_all()? + own)?, 1)?;
            of_critic.finish()?;
            evaluation.finish()?;
            let _ = step.finish()?;
            Ok(gradient.get().expect("the loss depends on it").to_vec2::<f32>()?)
        });
        for got in got {
            assert_eq!(got.expect("a step"), want, "{recomputed}");
        }
    }
}

/// Runs a layer of one model and then one of another, and a backward that fails.
fn refused(
    begin: fn(&mut hsdp::ShardedModel) -> std::result::Result<Evaluation<'_>, RuntimeError>,
    recomputed: bool,
    end: impl FnOnce(Pass<'_>, Pass<'_>, Tensor) -> Error,
) -> Error {
    let mesh = Mesh::new(1, 1).expect("one rank");
    let mut model = sharded(World::single(), layers(1, 4), mesh);
    let mut critic = sharded(World::single(), ModelSpec::new().unit(layer_unit(1, 4)), mesh);
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    let mut evaluation = begin(&mut critic).expect("an evaluation");
    let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
    let of_critic = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
    let x = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x)).expect("a forward");
    let y = Runner { units: &of_critic, recomputed }.layer(1, &x).expect("a forward");
    let loss = y.sqr().and_then(|it| it.mean_all()).expect("a scalar");
    end(pass, of_critic, loss)
}

#[test]
fn a_batch_that_is_finished_before_the_backward_says_so() {
    for recomputed in [false, true] {
        let begin = hsdp::ShardedModel::evaluation_with_backward;
        let error = refused(begin, recomputed, |pass, of_critic, loss| {
            of_critic.finish().expect("the end of the batch");
            pass.backward(&loss, 1).expect_err("the unit is freed")
        });
        assert!(
            matches!(&error, Error::LostGradients(LostGradients::BatchFinished { unit }) if unit == "layer.1"),
            "{error:?}"
        );
    }
}

/// The gradient of an input comes through one use of the critic in two backwards.
#[test]
fn a_batch_whose_use_serves_a_second_backward_says_so() {
    for recomputed in [false, true] {
        let mesh = Mesh::new(1, 1).expect("one rank");
        let mut model = sharded(World::single(), layers(1, 4), mesh);
        let mut critic = sharded(World::single(), ModelSpec::new().unit(layer_unit(1, 4)), mesh);
        let mut step = model.begin_step(StepOptions::microbatches(2)).expect("a step");
        let mut evaluation = critic.evaluation_with_backward().expect("an evaluation");
        let of_critic = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
        let x = Var::from_tensor(&input(0, 3, 4)).expect("a variable");
        let y = Runner { units: &of_critic, recomputed }.layer(1, &x).expect("a forward");
        let mut backward = || {
            let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
            let _gradient = pass.gradient_of(&x);
            let own = loss_of_layers(&pass, 1, &input(1, 3, 4)).expect("a forward");
            let loss = y.sqr().and_then(|it| it.mean_all()? + own).expect("a scalar");
            pass.backward(&loss, 1)
        };
        backward().expect("the first backward");
        let error = backward().expect_err("the unit is freed");
        let Error::LostGradients(LostGradients::BatchUsed { unit }) = &error else {
            panic!("{recomputed}: {error:?}")
        };
        assert_eq!(unit, "layer.1");
    }
}

/// The earlier of two uses reads no parameter, so its backward comes to a unit that is done.
#[test]
fn a_unit_of_a_batch_may_run_twice_in_one_backward() {
    for recomputed in [false, true] {
        let mesh = Mesh::new(1, 1).expect("one rank");
        let mut model = sharded(World::single(), layers(1, 4), mesh);
        let unit = layer_unit(1, 4).keep();
        let mut critic = sharded(World::single(), ModelSpec::new().unit(unit), mesh);
        let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        let mut evaluation = critic.evaluation_with_backward().expect("an evaluation");
        let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
        let of_critic = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
        let x = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x)).expect("a forward");
        let x = match recomputed {
            false => of_critic.unit("layer.1", &x, |_, x| x.tanh()),
            true => of_critic.recomputed("layer.1", &x, |_, x| x.tanh()),
        };
        let x = x.expect("a forward");
        let y = Runner { units: &of_critic, recomputed }.layer(1, &x).expect("a forward");
        let loss = y.sqr().and_then(|it| it.mean_all()).expect("a scalar");
        pass.backward(&loss, 1).unwrap_or_else(|error| panic!("{recomputed}: {error}"));
    }
}

#[test]
fn an_evaluation_without_a_backward_names_the_one_with_it() {
    for recomputed in [false, true] {
        let error = refused(hsdp::ShardedModel::evaluation, recomputed, |pass, _, loss| {
            pass.backward(&loss, 1).expect_err("the evaluation has no backward")
        });
        assert!(
            matches!(&error, Error::LostGradients(LostGradients::OtherPass { what }) if what == "unit layer.1"),
            "{error:?}"
        );
        assert!(error.to_string().contains("`ShardedModel::evaluation_with_backward`"), "{error}");
    }
}

#[test]
fn a_batch_has_no_backward_of_its_own() {
    for recomputed in [false, true] {
        let begin = hsdp::ShardedModel::evaluation_with_backward;
        let error = refused(begin, recomputed, |_, of_critic, loss| {
            of_critic.backward(&loss, 1).expect_err("it has no loss")
        });
        assert!(matches!(&error, Error::Runtime(RuntimeError::Misuse { .. })), "{error:?}");
        assert!(error.to_string().contains("takes part in the backward"), "{error}");
        let error = refused(begin, recomputed, |_, _, loss| {
            Error::from(loss.backward().expect_err("no pass runs it"))
        });
        assert!(
            matches!(&error, Error::LostGradients(LostGradients::TensorBackward { .. })),
            "{error:?}"
        );
    }
}

/// The backward fails on rank 1 alone, whose program drops the evaluation before the step.
#[test]
fn the_failure_of_a_backward_through_a_critic_reaches_the_other_ranks() {
    let errors = common::results(2, |world| -> std::result::Result<(), Error> {
        let rank = world.rank().index();
        let mut model = sharded(world.clone(), layers(1, 4), two_shards());
        let mut critic = sharded(world, layers(1, 4), two_shards());
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut evaluation = critic.evaluation_with_backward()?;
        let pass = Pass::new(step.microbatch()?)?;
        let of_critic = Pass::new(evaluation.batch()?)?;
        let x = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        let mut x = of_critic.unit("layer.0", &x, |p, x| layer(p, 0, x))?;
        if rank == 1 {
            x = (&x + Var::from_tensor(&x.detach())?.as_tensor())?;
        }
        pass.backward(&x.sqr()?.mean_all()?, 1)?;
        of_critic.finish()?;
        evaluation.finish()?;
        let _ = step.finish()?;
        Ok(())
    });
    for error in errors {
        let error = error.expect_err("rank 1 has a variable of its own").to_string();
        assert!(error.contains("1 of the program's own variables"), "{error}");
    }
}

/// A tensor that leaves a recomputed unit of the critic beside its output.
#[test]
fn a_tensor_beside_the_output_of_a_critic_is_named() {
    let mesh = Mesh::new(1, 1).expect("one rank");
    let mut model = sharded(World::single(), layers(1, 4), mesh);
    let mut critic = sharded(World::single(), layers(1, 4), mesh);
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    let mut evaluation = critic.evaluation_with_backward().expect("an evaluation");
    let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
    let of_critic = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
    let x = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x)).expect("a forward");
    let beside = std::sync::Arc::new(std::sync::Mutex::new(None));
    let slot = std::sync::Arc::clone(&beside);
    let forward = move |p: &dyn Parameters, x: &Tensor| {
        let y = layer(p, 0, x)?;
        *slot.lock().expect("no panic") = Some(y.sqr()?);
        Ok(y)
    };
    let y = of_critic.recomputed("layer.0", &x, forward).expect("a forward");
    let squares = beside.lock().expect("no panic").take().expect("one forward");
    let loss = (y + squares).and_then(|it| it.mean_all()).expect("a scalar");
    let error = pass.backward(&loss, 1).expect_err("it depends on the squares");
    assert!(
        matches!(&error, Error::LostGradients(LostGradients::BesideOutput { unit, .. }) if unit == "layer.0"),
        "{error:?}"
    );
}
