//! Units with several inputs, as `unit` and as `recomputed`: losses, parameters and gradients are
//! those of plain candle.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::softmax;
use hsdp::{
    Mesh, ModelOptions, ModelSpec, Optimizer as _, Param, Precision, Sgd, SgdOptions, StepOptions,
    Unit, Unused, World,
};
use hsdp_candle::{Error, Parameters, Pass, Plain, UnitsExt};
use hsdp_sharding::Role;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::common::{
    self, Named, Runner, input, layer_unit, layers, mean, plain_gradients, sharded, sharded_with,
    step, values, words,
};

const MESHES: [&str; 3] = ["1x1", "2x2", "1x4"];
const STEPS: usize = 3;
const LEARNING_RATE: f32 = 0.5;

type Loss = fn(Runner<'_>, usize) -> Result<Tensor>;

/// The mean loss of each step and the parameters after the last one, on all ranks' inputs, in plain
/// candle.
fn trained_by_candle(spec: &ModelSpec, mesh: Mesh, loss: Loss) -> (Vec<f64>, Named) {
    let trainable =
        |name: &str| spec.params().any(|(_, it)| it.name == name && it.role == Role::Trainable);
    let mut all: Named = spec.params().map(|(_, it)| (it.name.clone(), values(it))).collect();
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let plain = Plain::new(spec.clone(), &all, Precision::default()).expect("values for all");
        let runner = Runner { units: &plain, recomputed: false };
        let ranks = (0..mesh.world_size()).map(|rank| {
            let loss = loss(runner, rank).expect("a forward");
            let gradients = loss.backward().expect("plain candle");
            let of = |(name, var): (&String, &Var)| {
                let gradient = gradients.get(var).filter(|_| trainable(name))?;
                let flat = gradient.flatten_all().and_then(|it| it.to_vec1::<f32>());
                Some((name.clone(), flat.expect("a gradient in f32")))
            };
            let named: Named = plain.parameters().iter().filter_map(of).collect();
            (f64::from(loss.to_scalar::<f32>().expect("a scalar")), named)
        });
        let (of_ranks, parts): (Vec<f64>, Vec<Named>) = ranks.unzip();
        losses.push(of_ranks.iter().sum::<f64>() / mesh.world_size() as f64);
        for (name, gradient) in mean(mesh, &parts) {
            let parameter = all.get_mut(&name).expect("a parameter");
            for (value, gradient) in parameter.iter_mut().zip(gradient) {
                *value -= LEARNING_RATE * gradient;
            }
        }
    }
    (losses, all)
}

/// Trains a sharded model on one rank, and returns the losses and all parameters.
fn trained(
    world: World,
    spec: &ModelSpec,
    mesh: Mesh,
    loss: impl Fn(&Pass<'_>) -> Result<Tensor>,
) -> (Vec<f64>, Named) {
    let options = ModelOptions { unused: Unused::Zeros, ..ModelOptions::on(mesh) };
    let mut model = sharded_with(world, spec.clone(), options);
    let plain = SgdOptions { learning_rate: LEARNING_RATE.into(), ..SgdOptions::default() };
    let mut sgd = Sgd::new(&model, plain);
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let gradients = step(&mut model, &loss).expect("a step");
        losses.push(gradients.loss());
        sgd.step(&mut model, gradients).expect("an update");
    }
    (losses, model.full_parameters().expect("a gather"))
}

#[track_caller]
fn assert_near(got: f64, want: f64, what: &dyn Debug) {
    assert!((got - want).abs() <= 1e-6, "{what:?}: {got}, not {want}");
}

/// Checks that a model trains as in plain candle on every mesh, recomputed or not.
#[track_caller]
fn assert_as_in_candle(spec: &ModelSpec, loss: Loss) {
    for (mesh, recomputed) in MESHES.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        let what = (mesh, recomputed);
        let mesh: Mesh = mesh.parse().expect("a mesh");
        let (want_losses, want) = trained_by_candle(spec, mesh, loss);
        assert!(want_losses[STEPS - 1] < want_losses[0], "{what:?}: {want_losses:?}");
        let ranks = common::results(mesh.world_size(), |world| {
            let rank = world.rank().index();
            trained(world, spec, mesh, |pass| loss(Runner { units: pass, recomputed }, rank))
        });
        for (losses, got) in ranks {
            for (got, want) in losses.iter().zip(&want_losses) {
                assert_near(*got, *want, &what);
            }
            assert_eq!(got.len(), want.len());
            for (name, values) in &want {
                assert_eq!(got[name].len(), values.len());
                for (got, want) in got[name].iter().zip(values) {
                    assert_near(f64::from(*got), f64::from(*want), &(what, name));
                }
            }
        }
    }
}

fn matrix(unit: &str, shape: [usize; 2]) -> Unit {
    Unit::new(unit).param(Param::new(format!("{unit}.weight"), shape))
}

fn frozen(unit: Unit) -> Unit {
    unit.params.into_iter().fold(Unit::new(unit.name), |unit, param| unit.param(param.frozen()))
}

/// `spec` with one unit frozen.
fn with_frozen(spec: &ModelSpec, name: &str) -> ModelSpec {
    assert!(spec.units().iter().any(|unit| unit.name == name));
    spec.units().iter().cloned().fold(ModelSpec::new(), |spec, unit| {
        spec.unit(if unit.name == name { frozen(unit) } else { unit })
    })
}

fn by(p: &dyn Parameters, unit: &str, x: &Tensor) -> Result<Tensor> {
    x.matmul(&p.get(&format!("{unit}.weight"))?)
}

/// Two levels, whose skips go around three units and around one.
fn u_net_spec() -> ModelSpec {
    ModelSpec::new()
        .unit(matrix("down.0", [4, 5]))
        .unit(matrix("down.1", [5, 6]))
        .unit(matrix("middle", [6, 6]))
        .unit(matrix("up.1", [12, 5]))
        .unit(matrix("up.0", [10, 4]))
}

fn u_net(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
    let up = |name: &'static str, x: &Tensor, skip: &Tensor| {
        runner.run(name, [x, skip], move |p, [x, skip]| {
            by(p, name, &Tensor::cat(&[x, skip], 1)?)?.tanh()
        })
    };
    let one = runner.run("down.0", &input(rank, 3, 4), |p, x| by(p, "down.0", x)?.tanh())?;
    let two = runner.run("down.1", &one, |p, x| by(p, "down.1", x)?.tanh())?;
    let x = runner.run("middle", &two, |p, x| by(p, "middle", x)?.tanh())?;
    let x = up("up.1", &x, &two)?;
    up("up.0", &x, &one)?.sqr()?.mean_all()
}

#[test]
fn skips_go_around_units() {
    assert_as_in_candle(&u_net_spec(), u_net);
    for name in ["down.0", "middle", "up.1"] {
        assert_as_in_candle(&with_frozen(&u_net_spec(), name), u_net);
    }
}

fn attention_spec() -> ModelSpec {
    let cross = ["q", "k", "v"].into_iter().fold(Unit::new("cross"), |unit, name| {
        unit.param(Param::new(format!("cross.{name}.weight"), [4, 4]))
    });
    ModelSpec::new()
        .unit(Unit::new("encode").param(Param::new("encode.weight", [7, 4])))
        .unit(matrix("query", [5, 4]))
        .unit(cross)
        .unit(matrix("head", [4, 3]))
}

/// Cross attention of queries to tokens; a mask hides some tokens. The unit takes their ids, too.
fn cross_attention(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
    let shift = u32::try_from(rank).expect("few ranks");
    let ids: Vec<u32> = (0..6).map(|place| (place * 5 + shift) % 7).collect();
    let ids = Tensor::from_vec(ids, 6, &Device::Cpu)?;
    let mask: Vec<u8> = (0..18).map(|place| u8::from((place + rank) % 4 != 1)).collect();
    let mask = Tensor::from_vec(mask, (3, 6), &Device::Cpu)?;
    let memory = runner
        .run("encode", &ids, |p, ids| p.get("encode.weight")?.index_select(ids, 0)?.tanh())?;
    let x = runner.run("query", &input(rank, 3, 5), |p, x| by(p, "query", x)?.tanh())?;
    let x = runner.run("cross", [&x, &memory, &mask, &ids], |p, [x, memory, mask, ids]| {
        assert_eq!((mask.dtype(), ids.dtype()), (DType::U8, DType::U32));
        let q = by(p, "cross.q", x)?;
        let scores = q.matmul(&by(p, "cross.k", memory)?.t()?)?;
        let hidden = Tensor::full(-1e4_f32, scores.shape(), scores.device())?;
        let scores = mask.where_cond(&scores, &hidden)?;
        let bias = (ids.to_dtype(DType::F32)? * 0.1)?;
        let weights = softmax(&scores.broadcast_add(&bias)?, D::Minus1)?;
        x + weights.matmul(&by(p, "cross.v", memory)?)?
    })?;
    let x = runner.run("head", &x, |p, x| by(p, "head", x))?;
    x.sqr()?.mean_all()
}

#[test]
fn a_cross_attention_takes_a_mask() {
    assert_as_in_candle(&attention_spec(), cross_attention);
    for name in ["encode", "cross"] {
        assert_as_in_candle(&with_frozen(&attention_spec(), name), cross_attention);
    }
}

fn product_spec() -> ModelSpec {
    layers(3, 4).unit(matrix("product", [4, 4]))
}

fn product(p: &dyn Parameters, [x, y]: [&Tensor; 2]) -> Result<Tensor> {
    by(p, "product", x)?.tanh()? * y
}

#[test]
fn a_tensor_may_be_given_twice() {
    fn loss(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let x = runner.layer(0, &input(rank, 3, 4))?;
        let y = runner.run("product", [&x, &x], product)?;
        (runner.layer(1, &y)? + runner.layer(2, &x)?)?.sqr()?.mean_all()
    }
    assert_as_in_candle(&product_spec(), loss);
    assert_as_in_candle(&with_frozen(&product_spec(), "product"), loss);
}

#[test]
fn an_input_may_depend_on_another() {
    fn first(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let x = runner.layer(0, &input(rank, 3, 4))?;
        let y = runner.layer(2, &runner.layer(1, &x)?)?;
        runner.run("product", [&x, &y], product)?.sqr()?.mean_all()
    }
    fn last(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let x = runner.layer(0, &input(rank, 3, 4))?;
        let y = runner.layer(2, &runner.layer(1, &x)?)?;
        runner.run("product", [&y, &x], product)?.sqr()?.mean_all()
    }
    for spec in [product_spec(), with_frozen(&product_spec(), "product")] {
        assert_as_in_candle(&spec, first);
        assert_as_in_candle(&spec, last);
    }
}

/// A tensor that is not differentiated, and a unit that leaves an input out.
#[test]
fn inputs_may_have_no_gradient() {
    fn constant(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let x = runner.layer(1, &runner.layer(0, &input(rank, 3, 4))?)?;
        let x = runner.run("product", [&x, &input(rank + 1, 3, 4)], product)?;
        runner.layer(2, &x)?.sqr()?.mean_all()
    }
    fn left_out(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let x = runner.layer(0, &input(rank, 3, 4))?;
        let y = runner.layer(1, &x)?;
        let y = runner.run("product", [&x, &y], |p, [_, y]| by(p, "product", y)?.tanh())?;
        (runner.layer(2, &y)? + x)?.sqr()?.mean_all()
    }
    for spec in [product_spec(), with_frozen(&product_spec(), "layer.1")] {
        assert_as_in_candle(&spec, constant);
        assert_as_in_candle(&spec, left_out);
    }
}

#[test]
fn a_skip_may_be_detached() {
    fn outside(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let x = runner.layer(0, &input(rank, 3, 4))?;
        let y = runner.layer(2, &runner.layer(1, &x)?)?;
        runner.run("product", [&y, &x.detach()], product)?.sqr()?.mean_all()
    }
    fn inside(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let x = runner.layer(0, &input(rank, 3, 4))?;
        let y = runner.layer(2, &runner.layer(1, &x)?)?;
        let cut = |p: &dyn Parameters, [y, x]: [&Tensor; 2]| product(p, [y, &x.detach()]);
        runner.run("product", [&y, &x], cut)?.sqr()?.mean_all()
    }
    for spec in [product_spec(), with_frozen(&product_spec(), "layer.1")] {
        assert_as_in_candle(&spec, outside);
        assert_as_in_candle(&spec, inside);
    }
}

/// The order of the collectives is that of units in a row: a unit is reduced before its inputs are.
#[test]
fn units_are_gathered_and_reduced_in_one_order() {
    let events = |recomputed: bool| {
        let mesh = Mesh::new(1, 2).expect("two shards");
        common::results(2, |world| {
            let mut model = sharded(world, u_net_spec(), mesh);
            model.record_events();
            let loss = |pass: &Pass<'_>| u_net(Runner { units: pass, recomputed }, 0);
            let _ = step(&mut model, loss).expect("a step");
            let of_backward = |word: &String| !word.ends_with("forward");
            words(&model.take_events()).into_iter().filter(of_backward).collect::<Vec<_>>()
        })
    };
    let want = [
        "gather 4 backward",
        "gather 3 backward",
        "reduce 4",
        "gather 2 backward",
        "reduce 3",
        "gather 1 backward",
        "reduce 2",
        "gather 0 backward",
        "reduce 1",
        "reduce 0",
    ];
    for recomputed in [false, true] {
        events(recomputed).iter().for_each(|rank| assert_eq!(rank, &want, "{recomputed}"));
    }
}

/// Each float input gets the dtype of its unit, a mask keeps its own, and an error names the unit.
#[test]
fn float_inputs_are_cast_and_errors_name_the_unit() {
    let spec = ModelSpec::new()
        .unit(layer_unit(0, 4))
        .unit(matrix("product", [4, 4]).compute_in(hsdp::DType::BF16));
    let mut model = sharded(World::single(), spec, Mesh::new(1, 1).expect("one rank"));
    for recomputed in [false, true] {
        let mut run = |width: usize| {
            step(&mut model, |pass| {
                let runner = Runner { units: pass, recomputed };
                let x = runner.layer(0, &input(0, 3, 4))?;
                assert_eq!(x.dtype(), DType::F32);
                let other = input(1, 3, width);
                let mask = other.gt(0.0)?;
                let y = runner.run("product", [&x, &other, &mask], |p, [x, other, mask]| {
                    let dtypes = [x, other, mask].map(Tensor::dtype);
                    assert_eq!(dtypes, [DType::BF16, DType::BF16, DType::U8]);
                    product(p, [x, other])
                })?;
                y.to_dtype(DType::F32)?.sqr()?.mean_all()
            })
        };
        assert!(run(4).expect("a step").norm() > 0.0);
        let error = run(5).expect_err("the second input is too wide").to_string();
        assert!(error.starts_with("unit product: shape mismatch in mul"), "{error}");
    }
}

/// Messages of the warnings that a thread receives.
#[derive(Clone, Debug, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Visit for Warnings {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0.lock().expect("no panic").push(format!("{value:?}"));
        }
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The warning about cuts of a step on one rank.
fn cut_by(
    spec: &ModelSpec,
    recomputed: bool,
    forward: fn(&dyn Parameters, [&Tensor; 2]) -> Result<Tensor>,
    inputs: fn(&Tensor, &Tensor) -> Result<[Tensor; 2]>,
) -> Option<String> {
    // A place in the code that another thread reaches first must know of a subscriber.
    let _ = tracing::subscriber::set_global_default(Warnings::default());
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || {
        let options = ModelOptions {
            unused: Unused::Zeros,
            ..ModelOptions::on(Mesh::new(1, 1).expect("one rank"))
        };
        let mut model = sharded_with(World::single(), spec.clone(), options);
        let _ = step(&mut model, |pass| {
            let runner = Runner { units: pass, recomputed };
            let x = runner.layer(0, &input(0, 3, 4))?;
            let [a, b] = inputs(&x, &runner.layer(2, &runner.layer(1, &x)?)?)?;
            runner.run("product", [&a, &b], forward)?.sqr()?.mean_all()
        })
        .expect("a step");
    });
    let warnings = warnings.0.lock().expect("no panic").clone();
    warnings.into_iter().find(|it| it.starts_with("no gradient comes to"))
}

#[test]
fn an_input_that_its_unit_cuts_off_is_named() {
    let both = |x: &Tensor, y: &Tensor| Ok([x.clone(), y.clone()]);
    let told = |place: &str| {
        Some(format!(
            "no gradient comes to the input of unit product ({place}): an operation without a \
             backward or a detach cuts the graph there"
        ))
    };
    // With a frozen parameter in the model, hooks watch the inputs.
    for spec in [product_spec(), with_frozen(&product_spec(), "layer.1")] {
        for recomputed in [false, true] {
            let warning = |forward, inputs| cut_by(&spec, recomputed, forward, inputs);
            assert_eq!(warning(product, both), None);
            // The second input depends on the first.
            let first = warning(|p, [x, y]| product(p, [&x.detach(), y]), both);
            assert_eq!(first, told("input 1 of 2"));
            let second = warning(|p, [x, y]| product(p, [x, &y.detach()]), both);
            assert_eq!(second, told("input 2 of 2"));
            let twice = warning(
                |p, [x, y]| product(p, [x, &y.detach()]),
                |x, _| Ok([x.clone(), x.clone()]),
            );
            assert_eq!(twice, told("input 2 of 2"));
            let all = warning(|p, [x, y]| product(p, [&x.detach(), &y.detach()]), both);
            let all = all.expect("no gradient comes to any input");
            assert!(all.contains("(input 1 of 2), product (input 2 of 2)"), "{all}");
            // Without a gradient in any case: a detached skip, and a mask of floats.
            assert_eq!(warning(product, |x, y| Ok([x.detach(), y.clone()])), None);
            let mask = warning(product, |x, y| Ok([y.clone(), x.gt(0.0)?.to_dtype(x.dtype())?]));
            assert_eq!(mask, None);
            // candle's sum of tensors without elements is the first of them.
            let empty = warning(
                |_, [x, y]| x.add(y)?.sum_all(),
                |x, y| Ok([x.narrow(0, 0, 0)?, y.narrow(0, 0, 0)?]),
            );
            assert_eq!(empty, None);
        }
    }
}

/// A loss that is computed where it is used: the pass is borrowed, not consumed.
#[test]
fn each_call_after_a_backward_is_refused_by_name() {
    let spec = layers(1, 4);
    let want = plain_gradients(&spec, |plain| common::loss_of_layers(plain, 1, &input(0, 3, 4)));
    let mut model = sharded(World::single(), spec, Mesh::new(1, 1).expect("one rank"));
    let forward = |pass: &Pass<'_>| common::loss_of_layers(pass, 1, &input(0, 3, 4));
    for sum in [false, true] {
        let mut begun = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        let pass = Pass::new(begun.microbatch().expect("a microbatch")).expect("a pass");
        let refused = {
            match sum {
                true => pass.backward_sum(&forward(&pass).expect("a forward"), 1),
                false => pass.backward(&forward(&pass).expect("a forward"), 1),
            }
            .expect("a backward");
            let loss = Tensor::new(1_f32, &Device::Cpu).expect("a scalar");
            let again = [pass.backward(&loss, 1), pass.backward_sum(&loss, 1)];
            let runs = [
                pass.unit("layer.0", &loss, |_, x| Ok(x.clone())),
                pass.recomputed("layer.0", &loss, |_, x| Ok(x.clone())),
            ];
            let again = again.map(|it| it.expect_err("a second one"));
            let runs = runs.map(|it| Error::from(it.expect_err("it is over")));
            again.into_iter().chain(runs).chain([pass.finish().expect_err("it is over")])
        };
        let over = |it: Error| {
            assert!(matches!(it, Error::PassOver { .. }), "{it:?}");
            it.to_string().split(" is refused, because its pass is over").next().map(str::to_owned)
        };
        let calls: Vec<_> = refused.filter_map(over).collect();
        let unit = "unit layer.0";
        assert_eq!(calls, ["a backward", "a backward", unit, unit, "`finish`"]);
        let gradients = begun.finish().expect("a step").full(&model).expect("a gather");
        common::assert_same_bits(&gradients, &want);
    }
}
