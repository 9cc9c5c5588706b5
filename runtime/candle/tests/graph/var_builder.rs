//! A model whose constructors take a `VarBuilder` trains sharded as it is.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear};
use hsdp::{
    DType as HsdpDType, Mesh, ModelOptions, ModelSpec, Param, Precision, Sgd, SgdOptions,
    ShardedModel, StepOptions, Unit, World,
};
use hsdp_candle::{
    DeclarationError, Error, Parameters, Pass, Plain, Recorded, Units, UnitsExt, record,
    var_builder,
};

use crate::common::{self, input, layer_unit, layers, sharded, sharded_with, step};
use crate::llama::{Block, Config, Head, Llama, embed_tokens, loss};

const TINY: Config = Config { vocab: 13, hidden: 8, intermediate: 12, heads: 2, layers: 3 };
const PATTERNS: [&str; 3] = ["model.embed_tokens", "model.layers.*", "root"];
const STEPS: usize = 6;
const RATE: f64 = 0.2;

fn recorded() -> Recorded {
    record(|vb| Llama::load(&vb, &TINY)).expect("a model")
}

/// Different on each rank and in each step.
fn tokens(step: usize, rank: usize) -> Result<(Tensor, Tensor)> {
    let at = |i: usize| u32::try_from((i * i + 3 * i * (rank + 1) + step) % TINY.vocab);
    let tokens: Vec<u32> = (0..12).map(|i| at(i).expect("small")).collect();
    let tokens = Tensor::from_vec(tokens, (2, 6), &Device::Cpu)?;
    let targets = tokens.flip(&[1])?;
    Ok((tokens, targets))
}

/// The model's own layers, unit by unit.
fn logits(units: &dyn Units, tokens: &Tensor) -> Result<Tensor> {
    let mut x = units.unit("model.embed_tokens", tokens, |p, tokens| {
        embed_tokens(&var_builder(p), &TINY)?.forward(tokens)
    })?;
    for layer in 0..TINY.layers {
        let name = format!("model.layers.{layer}");
        x = units
            .unit(&name, &x, |p, x| Block::load(var_builder(p).pp(&name), &TINY)?.forward(x))?;
    }
    units.unit("root", &x, |p, x| Head::load(&var_builder(p), &TINY)?.forward(x))
}

fn train_sharded(world: World) -> std::result::Result<Vec<f64>, Error> {
    let rank = world.rank().index();
    let options = ModelOptions::on(Mesh::new(2, 2)?);
    let recorded = recorded();
    let mut model = ShardedModel::new(world, recorded.spec(&PATTERNS)?, options, recorded.init(7))?;
    let mut sgd = Sgd::new(&model, SgdOptions { learning_rate: RATE, ..Default::default() });
    let mut losses = Vec::new();
    for number in 0..STEPS {
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let pass = Pass::new(step.microbatch()?)?;
        let (tokens, targets) = tokens(number, rank)?;
        let mean = loss(&logits(&pass, &tokens)?, &targets)?;
        pass.backward(&mean, 12)?;
        let gradients = step.finish()?;
        losses.push(gradients.loss());
        hsdp::Optimizer::step(&mut sgd, &mut model, gradients)?;
    }
    Ok(losses)
}

/// Trains the model with candle's own variables and optimizer, on the batches of all ranks.
fn train_unsharded() -> Result<Vec<f64>> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let model = Llama::load(&vb, &TINY)?;
    let recorded = recorded();
    let init = recorded.init(7);
    for param in recorded.params() {
        let values = Tensor::from_vec(init(param), param.shape.as_slice(), &Device::Cpu)?;
        variables.data().lock().expect("no panic")[&param.name].set(&values)?;
    }
    let mut sgd = SGD::new(variables.all_vars(), RATE)?;
    let mut losses = Vec::new();
    for number in 0..STEPS {
        let of = |rank| {
            let (tokens, targets) = tokens(number, rank)?;
            loss(&model.forward(&tokens)?, &targets)
        };
        let mean = ((((of(0)? + of(1)?)? + of(2)?)? + of(3)?)? / 4.0)?;
        losses.push(f64::from(mean.to_scalar::<f32>()?));
        sgd.backward_step(&mean)?;
    }
    Ok(losses)
}

#[test]
fn a_model_with_constructors_trains_as_it_does_unsharded() {
    let want = train_unsharded().expect("plain candle");
    assert!(want[STEPS - 1] < want[0] - 0.1, "it learns: {want:?}");
    for got in common::results(4, train_sharded) {
        let got = got.expect("a run");
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-6, "{got} and {want}");
        }
    }
}

#[test]
fn whole_parameters_have_a_builder_too() {
    let recorded = recorded();
    let spec = recorded.spec(&PATTERNS).expect("units");
    let init = recorded.init(7);
    let values = recorded.params().map(|param| (param.name.clone(), init(param))).collect();
    let plain = Plain::new(spec, &values, Precision::default()).expect("a model");
    let (tokens, _) = tokens(0, 0).expect("a batch");
    let by_units = logits(&plain, &tokens).expect("a forward");
    let model = Llama::load(&var_builder(&plain), &TINY).expect("a model");
    let whole = model.forward(&tokens).expect("a forward");
    let values = |it: &Tensor| it.flatten_all().and_then(|it| it.to_vec1::<f32>()).expect("f32");
    assert_eq!(values(&by_units), values(&whole));
}

/// The error of a unit that runs `forward` on `layer.0` of a model in bf16.
fn refused(forward: impl Fn(VarBuilder<'_>) -> Result<Tensor>) -> Error {
    let precision = Precision::compute_in(HsdpDType::BF16);
    let mesh = Mesh::new(1, 1).expect("one rank");
    let options = ModelOptions { precision, ..ModelOptions::on(mesh) };
    let mut model = sharded_with(World::single(), layers(1, 4), options);
    let failed = step(&mut model, |pass| {
        let input = input(0, 2, 4).to_dtype(DType::BF16)?;
        pass.unit("layer.0", &input, |p, _| forward(var_builder(p)))
    });
    failed.expect_err("it is refused")
}

#[test]
fn another_dtype_is_refused_and_not_copied() {
    let error = refused(|vb| vb.to_dtype(DType::F32).get((4, 4), "layer.0.weight"));
    assert!(
        matches!(
            error,
            Error::Declaration(DeclarationError::Dtype {
                asked: DType::F32,
                computed: DType::BF16,
                ..
            })
        ),
        "{error:?}"
    );
    let said = error.to_string();
    assert!(
        said.starts_with(
            "parameter layer.0.weight of unit layer.0 is asked for as F32, and that unit computes in BF16"
        ),
        "{said}"
    );
    let error = refused(|vb| vb.get_unchecked_dtype("layer.0.weight", DType::F32));
    assert!(matches!(error, Error::Declaration(DeclarationError::Dtype { .. })), "{error:?}");
}

#[test]
fn another_shape_is_refused() {
    let error = refused(|vb| linear(8, 4, vb.pp("layer.0")).map(|it| it.weight().clone()));
    assert_eq!(
        error.to_string(),
        "parameter layer.0.weight of unit layer.0 is asked for as [4, 8], and declared as [4, 4]"
    );
}

#[test]
fn a_name_that_the_model_does_not_have_is_refused() {
    let error = refused(|vb| vb.pp("layer.0").get(4, "wieght"));
    assert!(matches!(&error, Error::Declaration(DeclarationError::UnknownParameter { unit, name })
        if unit == "layer.0" && name == "layer.0.wieght"));
}

#[test]
fn an_error_stays_typed_in_the_context_that_a_model_adds() {
    use candle_core::Context;
    let error = refused(|vb| vb.get(4, "layer.0.wieght").context("the first layer"));
    assert!(
        matches!(error, Error::Declaration(DeclarationError::UnknownParameter { .. })),
        "{error:?}"
    );
    let error = refused(|vb| vb.get(4, "layer.0.wieght").map_err(|e| e.context("the first")));
    assert!(
        matches!(error, Error::Declaration(DeclarationError::UnknownParameter { .. })),
        "{error:?}"
    );
}

#[test]
fn a_builder_knows_all_names_and_reads_through_aliases_and_views() {
    let spec = ModelSpec::new()
        .unit(layer_unit(0, 4).keep())
        .unit(Unit::new("head").param(Param::new("head.bias", [4])))
        .tie("head.weight", "layer.0.weight");
    let mut model = sharded(World::single(), spec, Mesh::new(1, 1).expect("one rank"));
    let gradients = step(&mut model, |pass| {
        let x = pass.unit("layer.0", &input(0, 3, 4), |p, x| {
            linear(4, 4, var_builder(p).pp("layer.0"))?.forward(x)?.tanh()
        })?;
        let y = pass.unit("head", &x, |p, x| {
            let names = ["layer.0.weight", "layer.0.bias", "head.bias", "head.weight"];
            let vb = var_builder(p);
            assert_eq!((vb.dtype(), vb.device().is_cpu()), (DType::F32, true));
            assert!(names.iter().all(|name| vb.contains_tensor(name)));
            assert!(vb.pp("head").contains_tensor("weight") && !vb.contains_tensor("head"));
            assert_eq!(vb.get_unchecked("head.bias")?.dims(), [4]);
            linear(4, 4, vb.pp("head"))?.forward(x)
        })?;
        y.sqr()?.mean_all()
    });
    assert!(gradients.expect("a step").norm() > 0.0);
}

#[test]
fn parameters_may_be_read_by_several_threads() {
    let mut model = sharded(World::single(), layers(1, 4), Mesh::new(1, 1).expect("one rank"));
    let gradients = step(&mut model, |pass| {
        let y = pass.unit("layer.0", &input(0, 3, 4), |p: &dyn Parameters, x| {
            std::thread::scope(|scope| {
                let read = || (p.get("layer.0.weight"), p.get("layer.0.bias"));
                let readers = [scope.spawn(read), scope.spawn(read), scope.spawn(read)];
                for reader in readers {
                    let (weight, bias) = reader.join().expect("no panic");
                    assert_eq!((weight?.dims(), bias?.dims()), (&[4, 4][..], &[4][..]));
                }
                common::layer(p, 0, x)
            })
        })?;
        y.sqr()?.mean_all()
    });
    assert!(gradients.expect("a step").norm() > 0.0);
}
