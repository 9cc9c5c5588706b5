//! Units that compute in dtypes of their own: their gradients are those of plain candle with the
//! same casts, bit by bit.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use hsdp::{
    Accumulation, AdamW, AdamWOptions, DType as HsdpDType, DynamicScale, LossScaling, Mesh,
    ModelOptions, ModelSpec, Optimizer, Param, Precision, ShardedModel, Unit, World,
};
use hsdp_candle::{Pass, Plain, Units, UnitsExt, candle_dtype, record, var_builder};

use crate::common::{
    self, Named, assert_same_bits, divided, input, layer, layer_unit, layers, mean,
    plain_gradients_in, sharded_with, step, step_of, sum, values,
};

const WIDTH: usize = 5;
const MIXTURES: [[Option<HsdpDType>; 3]; 3] = [
    [None, Some(HsdpDType::F32), None],
    [Some(HsdpDType::F16), None, Some(HsdpDType::F32)],
    [None, None, Some(HsdpDType::BF16)],
];

/// Three layers with these compute dtypes.
fn mixture(dtypes: [Option<HsdpDType>; 3]) -> ModelSpec {
    let units = layers(3, WIDTH).units().to_vec();
    let unit =
        |(unit, dtype): (Unit, Option<HsdpDType>)| dtype.into_iter().fold(unit, Unit::compute_in);
    units.into_iter().zip(dtypes).map(unit).fold(ModelSpec::new(), ModelSpec::unit)
}

/// The dtypes of a model whose output leaves in f32.
fn precision(parameters: HsdpDType) -> Precision {
    Precision { output: Some(HsdpDType::F32), ..Precision::compute_in(parameters) }
}

/// All layers, one after the other, and the mean of the squares. No line casts.
fn loss(units: &dyn Units, x: &Tensor) -> Result<Tensor> {
    let mut x = x.clone();
    for index in 0..3 {
        x = units.unit(&format!("layer.{index}"), &x, |p, x| {
            assert_eq!(x.dtype(), p.dtype());
            layer(p, index, x)
        })?;
    }
    units.output(&x)?.sqr()?.mean_all()
}

/// Computes [`loss`] with units that run again in the backward.
fn recomputed(units: &dyn Units, x: &Tensor) -> Result<Tensor> {
    let mut x = x.clone();
    for index in 0..3 {
        let forward = move |p: &dyn hsdp_candle::Parameters, x: &Tensor| layer(p, index, x);
        x = units.recomputed(&format!("layer.{index}"), &x, forward)?;
    }
    units.output(&x)?.sqr()?.mean_all()
}

/// The gradients by candle's own variables, with all casts written down.
fn by_hand(dtypes: [Option<HsdpDType>; 3], model: HsdpDType, x: &Tensor) -> Result<Named> {
    let spec = layers(3, WIDTH);
    let mut variables = BTreeMap::new();
    for (id, param) in spec.params() {
        let dtype = candle_dtype(dtypes[id.unit.index()].unwrap_or(model))?;
        let whole = Tensor::from_vec(values(param), param.shape.as_slice(), &Device::Cpu)?;
        variables.insert(param.name.clone(), Var::from_tensor(&whole.to_dtype(dtype)?)?);
    }
    let mut x = x.clone();
    for index in 0..3 {
        let read = |name: &str| variables[&format!("layer.{index}.{name}")].as_tensor();
        let weight = read("weight");
        let bias = read("bias");
        x = x.to_dtype(weight.dtype())?.matmul(&weight.t()?)?.broadcast_add(bias)?.tanh()?;
    }
    let gradients = x.to_dtype(DType::F32)?.sqr()?.mean_all()?.backward()?;
    let of = |(name, variable): (&String, &Var)| {
        let gradient = gradients.get(variable).expect("each parameter has a gradient");
        Ok((name.clone(), gradient.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?))
    };
    variables.iter().map(of).collect()
}

/// The full gradients of a step of one microbatch, on every rank.
fn sharded_gradients(
    spec: &ModelSpec,
    options: &ModelOptions,
    loss: fn(&dyn Units, &Tensor) -> Result<Tensor>,
) -> Vec<Named> {
    common::results(options.mesh.world_size(), |world: World| {
        let x = input(world.rank().index(), 4, WIDTH);
        let mut model = sharded_with(world, spec.clone(), options.clone());
        let gradients = step(&mut model, |pass| loss(pass, &x)).expect("a step");
        gradients.full(&model).expect("a gather")
    })
}

#[test]
fn gradients_are_those_of_plain_candle_with_the_casts_written_down() {
    for dtypes in MIXTURES {
        for parameters in [HsdpDType::F32, HsdpDType::BF16] {
            for mesh in ["1x1", "1x2", "2x2", "3x1"] {
                let mesh: Mesh = mesh.parse().expect("a mesh");
                let part = |rank| by_hand(dtypes, parameters, &input(rank, 4, WIDTH));
                let parts: Result<Vec<_>> = (0..mesh.world_size()).map(part).collect();
                let want = mean(mesh, &parts.expect("plain candle"));
                let on = ModelOptions::on(mesh);
                let options = ModelOptions { precision: precision(parameters), ..on };
                for loss in [loss, recomputed] {
                    for got in sharded_gradients(&mixture(dtypes), &options, loss) {
                        assert_same_bits(&got, &want);
                    }
                }
            }
        }
    }
}

/// The unsharded counterpart casts as a pass does.
#[test]
fn whole_parameters_have_the_dtypes_of_their_units() {
    for dtypes in MIXTURES {
        let want = by_hand(dtypes, HsdpDType::BF16, &input(0, 4, WIDTH)).expect("plain candle");
        let spec = mixture(dtypes);
        let of_plain = |run: fn(&dyn Units, &Tensor) -> Result<Tensor>| {
            plain_gradients_in(precision(HsdpDType::BF16), &spec, |plain| {
                run(plain, &input(0, 4, WIDTH))
            })
        };
        assert_same_bits(&of_plain(loss), &want);
        assert_same_bits(&of_plain(recomputed), &want);
    }
}

#[test]
fn every_mode_of_accumulation_sums_the_gradients_of_units_in_several_dtypes() {
    const MICROBATCHES: usize = 3;
    let dtypes = MIXTURES[1];
    let parameters = HsdpDType::BF16;
    let x = |rank, microbatch| input(rank + 4 * microbatch, 4, WIDTH);
    let part =
        |rank, microbatch| by_hand(dtypes, parameters, &x(rank, microbatch)).expect("plain candle");
    let microbatches = || 0..MICROBATCHES;
    // 1 x 2: rank by rank in each microbatch, or microbatch by microbatch on each rank.
    let scattered = || sum(microbatches().map(|at| sum([0, 1].into_iter().map(|it| part(it, at)))));
    let local = || sum([0, 1].into_iter().map(|it| sum(microbatches().map(|at| part(it, at)))));
    for accumulation in Accumulation::ALL {
        let total = if accumulation == Accumulation::Local { local() } else { scattered() };
        let want = divided(&total, 2.0 * MICROBATCHES as f64);
        common::results(2, |world| {
            let rank = world.rank().index();
            let on = ModelOptions::on(Mesh::new(1, 2).expect("two ranks"));
            let options = ModelOptions { accumulation, precision: precision(parameters), ..on };
            let mut model = sharded_with(world, mixture(dtypes), options);
            let gradients = step_of(&mut model, MICROBATCHES, |pass, at| loss(pass, &x(rank, at)));
            let got = gradients.and_then(|gradients| Ok(gradients.full(&model)?));
            assert_same_bits(&got.expect("a step"), &want);
        });
    }
}

/// Other models have the inputs that they are given: a dtype that does not fit is an error of
/// candle.
#[test]
fn a_model_without_such_units_does_not_cast() {
    let one = ModelOptions::on(Mesh::new(1, 1).expect("one rank"));
    let options = ModelOptions { precision: precision(HsdpDType::BF16), ..one };
    let run = |spec: ModelSpec| {
        let mut model = sharded_with(World::single(), spec, options.clone());
        step(&mut model, |pass| {
            let forward = |p: &dyn hsdp_candle::Parameters, x: &Tensor| layer(p, 0, x);
            let y = pass.unit("layer.0", &input(0, 4, WIDTH), forward)?;
            pass.output(&y)?.sqr()?.mean_all()
        })
    };
    let error = run(layers(1, WIDTH)).expect_err("f32 and bf16 are not multiplied");
    assert!(error.to_string().contains("dtype mismatch in matmul"), "{error}");
    let declared = ModelSpec::new().unit(layer_unit(0, WIDTH).compute_in(HsdpDType::BF16));
    let _ = run(declared).expect("the input is cast");
}

/// Ids are not cast, frozen parameters have the dtype of their unit, and an evaluation casts as a
/// pass with a backward does.
#[test]
fn ids_frozen_units_and_evaluations() {
    let spec = ModelSpec::new()
        .unit(
            Unit::new("embed")
                .param(Param::new("embed.weight", [7, WIDTH]).frozen())
                .compute_in(HsdpDType::BF16)
                .forward_only(),
        )
        .unit(layer_unit(0, WIDTH).keep());
    let loss = |units: &dyn Units| {
        let ids = Tensor::new(&[3_u32, 1, 6], &Device::Cpu)?;
        let x = units.unit("embed", &ids, |p, ids| {
            assert_eq!((ids.dtype(), p.dtype()), (DType::U32, DType::BF16));
            p.get("embed.weight")?.index_select(ids, 0)
        })?;
        assert_eq!(x.dtype(), DType::BF16);
        units.unit("layer.0", &x, |p, x| layer(p, 0, x))?.sqr()?.mean_all()
    };
    let all = spec.params().map(|(_, param)| (param.name.clone(), values(param))).collect();
    let plain = Plain::new(spec.clone(), &all, Precision::default()).expect("values for all");
    let want = loss(&plain).and_then(|loss| loss.to_scalar::<f32>()).expect("plain candle");
    common::results(2, |world| {
        let options = ModelOptions::on(Mesh::new(1, 2).expect("two ranks"));
        let mut model = sharded_with(world, spec.clone(), options);
        let mut evaluation = model.evaluation().expect("an evaluation");
        let pass = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
        let evaluated = loss(&pass).and_then(|loss| loss.to_scalar::<f32>()).expect("a forward");
        pass.finish().expect("a gather");
        evaluation.finish().expect("the end of the evaluation");
        let gradients = step(&mut model, |pass| loss(pass)).expect("a step");
        assert_eq!(evaluated.to_bits(), want.to_bits());
        assert_eq!(gradients.loss(), f64::from(want));
    });
}

/// A head in f32 reads the embedding of a unit in bf16.
#[test]
fn a_parameter_of_a_unit_in_another_dtype_is_refused_by_constructors_and_cast_by_a_forward() {
    let spec = ModelSpec::new()
        .unit(layer_unit(0, WIDTH).keep())
        .unit(Unit::new("head").param(Param::new("head.bias", [WIDTH])).compute_in(HsdpDType::F32))
        .tie("head.weight", "layer.0.weight");
    let by_constructor = |units: &dyn Units| {
        let x = units.unit("layer.0", &input(0, 4, WIDTH), |p, x| layer(p, 0, x))?;
        let y = units.unit("head", &x, |p, x| {
            use candle_nn::Module;
            candle_nn::linear(WIDTH, WIDTH, var_builder(p).pp("head"))?.forward(x)
        })?;
        y.sqr()?.mean_all()
    };
    let by_cast = |units: &dyn Units| {
        let x = units.unit("layer.0", &input(0, 4, WIDTH), |p, x| layer(p, 0, x))?;
        let y = units.unit("head", &x, |p, x| {
            let weight = p.get("head.weight")?;
            assert_eq!((weight.dtype(), p.dtype()), (DType::BF16, DType::F32));
            x.matmul(&weight.to_dtype(DType::F32)?.t()?)?.broadcast_add(&p.get("head.bias")?)
        })?;
        y.sqr()?.mean_all()
    };
    let precision = Precision::compute_in(HsdpDType::BF16);
    let options = |mesh: Mesh| ModelOptions { precision, ..ModelOptions::on(mesh) };
    let one = Mesh::new(1, 1).expect("one rank");
    let mut model = sharded_with(World::single(), spec.clone(), options(one));
    let error = step(&mut model, |pass| by_constructor(pass)).expect_err("it is refused");
    assert_eq!(
        error.to_string(),
        "parameter head.weight of unit layer.0 is asked for as F32, and that unit computes in BF16: cast the \
         activations, or set `Precision::parameters` or `Unit::compute_in`"
    );
    let want = plain_gradients_in(precision, &spec, |plain| by_cast(plain));
    for got in common::results(2, |world| {
        let two = Mesh::new(1, 2).expect("two ranks");
        let mut model = sharded_with(world, spec.clone(), options(two));
        let gradients = step(&mut model, |pass| by_cast(pass)).expect("a step");
        gradients.full(&model).expect("a gather")
    }) {
        assert_same_bits(&got, &want);
    }
}

/// One unit in f16 is enough for an overflow: all ranks skip the step, and halve the scale.
#[test]
fn an_overflow_in_the_only_unit_of_f16_halves_the_scale_on_all_ranks() {
    let spec = mixture([None, Some(HsdpDType::F16), None]);
    let initial = 2_f64.powi(30);
    for scale in common::results(4, |world| {
        let rank = world.rank().index();
        let dynamic = DynamicScale { initial, ..DynamicScale::default() };
        let options = ModelOptions {
            loss_scaling: LossScaling::Dynamic(dynamic),
            ..ModelOptions::on(Mesh::new(2, 2).expect("four ranks"))
        };
        let mut model = sharded_with(world, spec.clone(), options);
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let before = model.full_parameters().expect("a gather");
        let x = input(rank, 4, WIDTH);
        let mut train = |model: &mut ShardedModel| {
            let gradients = step(model, |pass| loss(pass, &x)).expect("a step");
            adamw.step(model, gradients).expect("an update");
            (model.loss_scale(), model.full_parameters().expect("a gather"))
        };
        let (halved, same) = train(&mut model);
        assert_eq!(same, before, "the step was skipped");
        let moved = (0..40).map(|_| train(&mut model)).find(|(_, now)| *now != before);
        assert!(moved.is_some(), "a smaller scale does not overflow");
        halved
    }) {
        assert_eq!(scale, initial / 2.0);
    }
}

#[test]
fn a_recorded_model_declares_the_dtypes_of_its_units() {
    let recorded = record(|vb| candle_nn::linear(4, 4, vb.pp("head"))).expect("a model");
    let spec = recorded.clone().compute_in("head", HsdpDType::F32).keep("head").spec(&["head"]);
    let head = spec.expect("a unit").units()[0].clone();
    assert_eq!(head.compute_dtype, Some(HsdpDType::F32));
    assert_eq!(head.after_forward, hsdp_sharding::AfterForward::Keep);
    let error = recorded.compute_in("heads", HsdpDType::F32).spec(&["head"]).expect_err("unknown");
    assert_eq!(error.to_string(), "the model has no unit heads, it has head");
}
