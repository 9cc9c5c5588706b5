//! Units whose forward runs again in the backward: the bits, and the order of collectives, are
//! those of units that keep their tensors.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{Linear, Module, embedding};
use hsdp::{
    DType as HsdpDType, Mesh, ModelOptions, ModelSpec, Param, Precision, ShardedModel, StepOptions,
    Unit, Unused, World,
};
use hsdp_candle::{Error, LostGradients, Parameters, Pass, Units, UnitsExt, record, var_builder};

use crate::common::{
    self, Named, assert_same_bits, input, layer, layer_unit, layers, plain_gradients, sharded,
    sharded_with, step, words,
};
use crate::llama::{self, Block, Config, Head, Llama, embed_tokens};

const MESHES: [&str; 3] = ["1x1", "1x2", "2x2"];
const DTYPES: [HsdpDType; 2] = [HsdpDType::F32, HsdpDType::BF16];

/// Runs a model's units, and recomputes those that `which` chooses.
#[derive(Clone, Copy)]
struct Runner<'a> {
    units: &'a dyn Units,
    which: fn(&str) -> bool,
}

impl Runner<'_> {
    fn run(
        self,
        name: &str,
        x: &Tensor,
        forward: impl Fn(&dyn Parameters, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        match (self.which)(name) {
            true => self.units.recomputed(name, x, forward),
            false => self.units.unit(name, x, forward),
        }
    }
}

type Loss = fn(Runner<'_>, usize) -> Result<Tensor>;

/// The loss, and the gradients by name with the name's knowledge of whether it has one, of one step
/// on rank 0.
type Outcome = (u64, Named, Vec<bool>);

struct Case<'a> {
    spec: &'a ModelSpec,
    loss: Loss,
    mesh: &'a str,
    dtype: HsdpDType,
}

impl Case<'_> {
    fn outcome(&self, which: fn(&str) -> bool) -> Outcome {
        let mesh: Mesh = self.mesh.parse().expect("a mesh");
        let precision =
            Precision { output: Some(HsdpDType::F32), ..Precision::compute_in(self.dtype) };
        let unused = Unused::Zeros;
        let options = ModelOptions { precision, unused, ..ModelOptions::on(mesh) };
        let ranks = common::results(mesh.world_size(), |world: World| {
            let rank = world.rank().index();
            let mut model = common::sharded_with(world, self.spec.clone(), options.clone());
            let gradients =
                step(&mut model, |pass| (self.loss)(Runner { units: pass, which }, rank));
            let gradients = gradients.expect("a step");
            let has = self.spec.params().map(|(id, _)| gradients.has_gradient(id)).collect();
            (gradients.loss().to_bits(), gradients.full(&model).expect("a gather"), has)
        });
        ranks.into_iter().next().expect("rank 0")
    }
}

/// Asserts that the units that each of `choices` recomputes change no bit, on each mesh and in each
/// dtype.
fn assert_no_bit_changes(spec: &ModelSpec, loss: Loss, choices: &[fn(&str) -> bool]) {
    for (mesh, dtype) in MESHES.into_iter().flat_map(|mesh| DTYPES.map(|dtype| (mesh, dtype))) {
        let case = Case { spec, loss, mesh, dtype };
        let want = case.outcome(|_| false);
        assert!(want.1.values().flatten().any(|value| *value != 0.0), "there are gradients");
        for choice in choices {
            let got = case.outcome(*choice);
            assert_same_bits(&got.1, &want.1);
            assert_eq!((got.0, got.2), (want.0, want.2.clone()), "{mesh} {dtype}");
        }
    }
}

fn all(_: &str) -> bool {
    true
}

/// `x` in the dtype in which the parameters of `units` are.
fn like_parameters(runner: Runner<'_>, unit: &str, x: &Tensor) -> Result<Tensor> {
    let mut dtype = None;
    runner.units.unit(unit, x, |p, x| {
        dtype = Some(p.dtype());
        Ok(x.clone())
    })?;
    x.to_dtype(dtype.expect("it ran"))
}

fn mlp(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
    let mut x = like_parameters(runner, "probe", &input(rank, 4, 5))?;
    for index in 0..3 {
        x = runner.run(&format!("layer.{index}"), &x, move |p, x| layer(p, index, x))?;
    }
    runner.units.output(&x)?.sqr()?.mean_all()
}

/// A unit whose only purpose is to tell the dtype, before `spec`.
fn probed(spec: &ModelSpec) -> ModelSpec {
    let probe = Unit::new("probe").param(Param::new("probe", [1]).frozen());
    let units = std::iter::once(probe).chain(spec.units().iter().cloned());
    let probed = units.fold(ModelSpec::new(), ModelSpec::unit);
    spec.ties().fold(probed, |spec, (alias, target)| spec.tie(alias, target))
}

#[test]
fn layers_have_the_same_bits() {
    assert_no_bit_changes(&probed(&layers(3, 5)), mlp, &[all, |unit| unit == "layer.1"]);
}

const TINY: Config = Config { vocab: 13, hidden: 8, intermediate: 12, heads: 2, layers: 3 };

fn llama(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
    let shift = u32::try_from(rank).expect("few ranks");
    let tokens: Vec<u32> = (0..12).map(|i| (i * i + (5 + shift) * i) % 13).collect();
    let tokens = Tensor::from_vec(tokens, (2, 6), &Device::Cpu)?;
    let mut x = runner.run("model.embed_tokens", &tokens, |p, tokens| {
        embed_tokens(&var_builder(p), &TINY)?.forward(tokens)
    })?;
    for index in 0..TINY.layers {
        let name = format!("model.layers.{index}");
        let prefix = name.clone();
        x = runner.run(&name, &x, move |p, x| {
            Block::load(var_builder(p).pp(&prefix), &TINY)?.forward(x)
        })?;
    }
    let x = runner.run("root", &x, |p, x| Head::load(&var_builder(p), &TINY)?.forward(x))?;
    llama::loss(&runner.units.output(&x)?, &tokens.flip(&[1])?)
}

fn llama_spec(change: impl FnMut(Param) -> Param) -> ModelSpec {
    let recorded = record(|vb| Llama::load(&vb, &TINY)).expect("a model").map(change);
    recorded.spec(&["model.embed_tokens", "model.layers.*", "root"]).expect("units")
}

#[test]
fn a_transformer_has_the_same_bits() {
    let blocks = |unit: &str| unit.starts_with("model.layers");
    assert_no_bit_changes(&llama_spec(|param| param), llama, &[all, blocks]);
}

#[test]
fn frozen_parameters_change_no_bit() {
    let mlps = |param: Param| if param.name.contains("mlp") { param.frozen() } else { param };
    assert_no_bit_changes(&llama_spec(mlps), llama, &[all, |unit| unit.ends_with('1')]);
    // A whole unit in the middle, and all before it: their uses have no gradient at all.
    let middle = |param: Param| if param.name.contains("s.1.") { param.frozen() } else { param };
    assert_no_bit_changes(&llama_spec(middle), llama, &[all, |unit| unit.ends_with('1')]);
    let first = |param: Param| {
        let is_first = param.name.contains("s.0.") || param.name.contains("embed");
        if is_first { param.frozen() } else { param }
    };
    assert_no_bit_changes(&llama_spec(first), llama, &[all]);
}

fn tied() -> ModelSpec {
    ModelSpec::new()
        .unit(Unit::new("embed").param(Param::new("embed.weight", [7, 4])).keep())
        .unit(layer_unit(0, 4))
        .unit(Unit::new("head").param(Param::new("head.bias", [7])))
        .tie("head.weight", "embed.weight")
}

fn loss_of_tied(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
    let shift = u32::try_from(rank).expect("few ranks");
    let tokens: Vec<u32> = (0..6).map(|i| (i * 3 + shift) % 7).collect();
    let tokens = Tensor::from_vec(tokens, 6, &Device::Cpu)?;
    let x = runner.run("embed", &tokens, |p, tokens| {
        embedding(7, 4, var_builder(p).pp("embed"))?.forward(tokens)
    })?;
    let x = runner.run("layer.0", &x, |p, x| layer(p, 0, x))?;
    let x = runner.run("head", &x, |p, x| {
        Linear::new(p.get("head.weight")?, Some(p.get("head.bias")?)).forward(x)
    })?;
    runner.units.output(&x)?.sqr()?.mean_all()
}

#[test]
fn a_tied_weight_gets_its_gradient_in_pieces() {
    let choices: [fn(&str) -> bool; 5] = [
        all,
        |unit| unit == "embed",
        |unit| unit == "head",
        |unit| unit != "head",
        |unit| unit != "embed",
    ];
    assert_no_bit_changes(&tied(), loss_of_tied, &choices);
}

#[test]
fn a_frozen_tied_weight_stays_for_all_its_uses() {
    let frozen = |unit: Unit| {
        unit.params.into_iter().fold(Unit::new(unit.name), |unit, param| unit.param(param.frozen()))
    };
    let tied = tied();
    let spec = ModelSpec::new()
        .unit(frozen(tied.units()[0].clone()).keep())
        .unit(tied.units()[1].clone())
        .unit(tied.units()[2].clone())
        .tie("head.weight", "embed.weight");
    assert_no_bit_changes(&spec, loss_of_tied, &[all, |unit| unit == "head"]);
}

#[test]
fn a_frozen_parameter_stays_after_the_gradients_of_its_unit_came() {
    // The backward of `scale` comes first, and has the only gradient of its unit.
    fn loss(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let scaled = |p: &dyn Parameters, x: &Tensor| x.broadcast_mul(&p.get("scale.weight")?);
        let x = like_parameters(runner, "probe", &input(rank, 3, 4))?;
        let x = runner.run("layer.0", &x, move |p, x| scaled(p, &layer(p, 0, x)?))?;
        let x = runner
            .run("scale", &x, move |p, x| scaled(p, x)?.broadcast_add(&p.get("scale.bias")?))?;
        runner.units.output(&x)?.sqr()?.mean_all()
    }
    let scale = Unit::new("scale").param(Param::new("scale.weight", [4]).frozen());
    let scale = scale.param(Param::new("scale.bias", [4])).keep();
    let spec = ModelSpec::new().unit(layer_unit(0, 4)).unit(scale);
    let choices: [fn(&str) -> bool; 3] = [all, |unit| unit == "layer.0", |unit| unit == "scale"];
    assert_no_bit_changes(&probed(&spec), loss, &choices);
}

#[test]
fn a_unit_may_be_recomputed_twice_in_a_forward() {
    fn loss(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let mut x = like_parameters(runner, "probe", &input(rank, 3, 4))?;
        for index in [0, 1, 0] {
            x = runner.run(&format!("layer.{index}"), &x, move |p, x| layer(p, index, x))?;
        }
        runner.units.output(&x)?.sqr()?.mean_all()
    }
    let spec = ModelSpec::new().unit(layer_unit(0, 4).keep()).unit(layer_unit(1, 4));
    assert_no_bit_changes(&probed(&spec), loss, &[all, |unit| unit == "layer.1"]);
}

#[test]
fn what_the_loss_does_not_need_gets_no_gradient() {
    // layer.0's bias is read and has no effect; layer.1 is recomputed, and its output dropped;
    // layer.2 does not run.
    fn loss(runner: Runner<'_>, rank: usize) -> Result<Tensor> {
        let x = like_parameters(runner, "probe", &input(rank, 3, 4))?;
        let x = runner.run("layer.0", &x, |p, x| {
            p.get("layer.0.bias")?;
            x.matmul(&p.get("layer.0.weight")?)?.tanh()
        })?;
        runner.run("layer.1", &x, |p, x| layer(p, 1, x))?;
        let x = runner.run("layer.3", &x, |p, x| layer(p, 3, x))?;
        runner.units.output(&x)?.sqr()?.mean_all()
    }
    assert_no_bit_changes(&probed(&layers(4, 4)), loss, &[all, |unit| unit == "layer.1"]);
}

#[test]
fn an_input_that_has_no_effect_gets_zeros() {
    let loss = |units: &dyn Units| {
        let x = units.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        let constant = |p: &dyn Parameters, x: &Tensor| layer(p, 1, &x.zeros_like()?);
        units.recomputed("layer.1", &x, constant)?.sqr()?.mean_all()
    };
    let mut want = plain_gradients(&layers(2, 4), |plain| loss(plain));
    want.insert("layer.0.weight".to_owned(), vec![0.0; 16]);
    want.insert("layer.0.bias".to_owned(), vec![0.0; 4]);
    let options = ModelOptions {
        unused: Unused::Zeros,
        ..ModelOptions::on(Mesh::new(1, 1).expect("one rank"))
    };
    let mut model = sharded_with(World::single(), layers(2, 4), options);
    let gradients = step(&mut model, |pass| loss(pass)).expect("a step");
    assert_same_bits(&gradients.full(&model).expect("a gather"), &want);
}

#[test]
fn an_input_that_is_a_view_is_made_contiguous_for_both_runs() {
    let loss = |units: &dyn Units, view: fn(&Tensor) -> Result<Tensor>| {
        let x = units.unit("layer.0", &input(0, 4, 4), |p, x| layer(p, 0, x))?;
        let forward = |p: &dyn Parameters, x: &Tensor| layer(p, 1, x);
        units.recomputed("layer.1", &view(&x)?, forward)?.sqr()?.mean_all()
    };
    let want = plain_gradients(&layers(2, 4), |plain| loss(plain, |x| x.t()?.contiguous()));
    let mut model = alone(layers(2, 4));
    let gradients = step(&mut model, |pass| loss(pass, Tensor::t)).expect("a step");
    assert_same_bits(&gradients.full(&model).expect("a gather"), &want);
}

#[test]
fn collectives_are_those_of_units_that_keep_their_tensors() {
    let events = |which: fn(&str) -> bool| {
        common::results(2, move |world| {
            let on = ModelOptions::on(Mesh::new(1, 2).expect("two shards"));
            // No unit uses its bias.
            let options = ModelOptions { unused: Unused::Zeros, ..on };
            let mut model = common::sharded_with(world, layers(3, 4), options);
            model.record_events();
            let loss = |pass: &Pass<'_>| {
                let runner = Runner { units: pass, which };
                let mut x = input(0, 4, 4);
                for index in 0..3 {
                    // A weight on the left of a matmul comes first in candle's order.
                    x = runner.run(&format!("layer.{index}"), &x, move |p, x| {
                        p.get(&format!("layer.{index}.weight"))?.matmul(x)?.tanh()
                    })?;
                }
                x.sqr()?.mean_all()
            };
            let _ = step(&mut model, loss).expect("a step");
            words(&model.take_events())
        })
    };
    let want = events(|_| false);
    assert_eq!(want[0].iter().filter(|word| word.starts_with("reduce")).count(), 3);
    let choices: [fn(&str) -> bool; 3] = [all, |unit| unit == "layer.1", |unit| unit != "layer.1"];
    for choice in choices {
        assert_eq!(events(choice), want);
    }
}

fn alone(spec: ModelSpec) -> ShardedModel {
    sharded(World::single(), spec, Mesh::new(1, 1).expect("one rank"))
}

/// The error of a step that recomputes layer 1 of two by `forward`.
fn refused(
    forward: impl Fn(&dyn Parameters, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Error {
    let mut model = alone(layers(2, 4));
    let failed = step(&mut model, |pass| {
        let x = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        pass.recomputed("layer.1", &x, forward)?.sqr()?.mean_all()
    });
    let error = failed.expect_err("it is refused");
    let gradients = step(&mut model, |pass| common::loss_of_layers(pass, 2, &input(0, 3, 4)));
    assert!(gradients.expect("a clean step").norm() > 0.0);
    error
}

#[test]
fn a_dropout_that_draws_a_new_seed_is_refused() {
    let runs = AtomicUsize::new(0);
    let error = refused(move |p, x| {
        let run = runs.fetch_add(1, Ordering::Relaxed) as f64;
        layer(p, 1, &(x + run * 1e-6)?)
    });
    assert!(
        matches!(&error, Error::LostGradients(LostGradients::NotRepeatable { unit, .. }) if unit == "layer.1"),
        "{error:?}"
    );
    assert_eq!(
        error.to_string(),
        "recomputed unit layer.1 is not repeatable: its second output differs from its first, as \
         with a dropout that draws a new seed"
    );
}

#[test]
fn a_parameter_that_only_the_second_run_reads_is_refused() {
    let runs = AtomicUsize::new(0);
    let error = refused(move |p, x| {
        if runs.fetch_add(1, Ordering::Relaxed) > 0 {
            p.get("layer.0.bias")?;
        }
        layer(p, 1, x)
    });
    assert_eq!(
        error.to_string(),
        "recomputed unit layer.1 is not repeatable: its second run reads parameter layer.0.bias, \
         and its first did not"
    );
}

#[test]
fn a_captured_tensor_with_a_history_is_refused() {
    let captured = Var::new(&[[1_f32; 4]; 3], &Device::Cpu).expect("a variable");
    let captured = (captured.as_tensor() * 2.0).expect("a tensor with a history");
    let error = refused(move |p, x| layer(p, 1, &(x + &captured)?));
    assert!(
        matches!(&error, Error::LostGradients(LostGradients::History { unit, .. }) if unit == "layer.1"),
        "{error:?}"
    );
    let message = error.to_string();
    assert!(message.contains("depends on variables of the program ([3, 4] of f32)"), "{message}");
    assert!(message.contains("run it with `unit`"), "{message}");
}

/// A value that is computed from a parameter once and kept would get no gradient in the second run.
#[test]
fn a_value_of_the_first_run_that_the_second_uses_is_refused() {
    let cache = OnceLock::new();
    let error = refused(move |p, x| {
        let weight = p.get("layer.1.weight")?;
        let twice = cache.get_or_init(|| (weight * 2.0).expect("it is full"));
        x.matmul(twice)?.broadcast_add(&p.get("layer.1.bias")?)
    });
    assert!(
        matches!(&error, Error::LostGradients(LostGradients::NotRepeatable { .. })),
        "{error:?}"
    );
    assert!(error.to_string().contains("a cache of a value computed from parameters"), "{error}");
}

#[test]
fn an_error_of_the_second_run_comes_back_as_it_is() {
    let runs = AtomicUsize::new(0);
    let error = refused(move |p, x| match runs.fetch_add(1, Ordering::Relaxed) {
        0 => layer(p, 1, x),
        _ => p.get("layer.1.wieght"),
    });
    assert!(
        matches!(error, Error::LostGradients(LostGradients::NotRepeatable { .. })),
        "{error:?}"
    );
    let runs = AtomicUsize::new(0);
    let error = refused(move |p, x| match runs.fetch_add(1, Ordering::Relaxed) {
        0 => layer(p, 1, x),
        _ => candle_core::bail!("the model's own"),
    });
    assert!(matches!(&error, Error::Candle(_)), "{error:?}");
}

#[test]
fn a_recomputed_unit_that_is_needed_again_must_be_kept() {
    let mut model = alone(layers(1, 4));
    let failed = step(&mut model, |pass| {
        let again = |p: &dyn Parameters, x: &Tensor| layer(p, 0, x);
        let x = pass.recomputed("layer.0", &input(0, 4, 4), again)?;
        pass.recomputed("layer.0", &x, again)
    });
    assert!(matches!(failed, Err(Error::Freed { unit }) if unit == "layer.0"));
}

#[test]
fn microbatches_accumulate() {
    let outcome = |which: fn(&str) -> bool| {
        let mut model = alone(probed(&layers(3, 5)));
        let mut step = model.begin_step(StepOptions::microbatches(3)).expect("a step");
        for microbatch in 0..3 {
            let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
            let loss = mlp(Runner { units: &pass, which }, microbatch).expect("a forward");
            pass.backward(&loss, 1).expect("a backward");
        }
        step.finish().expect("a step").full(&model).expect("a gather")
    };
    assert_same_bits(&outcome(all), &outcome(|_| false));
}
