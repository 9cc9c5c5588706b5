//! Variables of the program that a loss depends on: their gradients are given to it, or refused.

use candle_core::{DType, Device, Result, Tensor, Var};
use hsdp::dist::{OnBoth, Partial, Sum};
use hsdp::{
    DType as HsdpDType, LossScaling, Mesh, ModelOptions, Precision, ShardedModel, StepOptions,
};
use hsdp_candle::distributed::{Dist, Tape};
use hsdp_candle::{Error, LostGradients, Pass, Plain, Units, UnitsExt, VariableGradient};

use crate::common::{
    self, input, layer, layers, loss_of_layers, sharded, sharded_with, step, values,
};

fn mesh(ranks: usize) -> Mesh {
    Mesh::new(1, ranks).expect("shards")
}

fn temperature() -> Var {
    Var::new(&[2_f32], &Device::Cpu).expect("a variable")
}

/// Where a loss depends on a variable of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    InUnit,
    AfterUnits,
    Input,
    InRecomputed,
}

const PLACES: [Place; 4] = [Place::InUnit, Place::AfterUnits, Place::Input, Place::InRecomputed];

/// Two layers, and a scale of the program's own.
fn scaled(units: &dyn Units, place: Place, scale: &Tensor, x: &Tensor) -> Result<Tensor> {
    let x = if place == Place::Input { x.broadcast_mul(scale)? } else { x.clone() };
    let x = units.unit("layer.0", &x, |p, x| match place {
        Place::InUnit => layer(p, 0, x)?.broadcast_mul(scale),
        _ => layer(p, 0, x),
    })?;
    let captured = scale.clone();
    let x = units.recomputed("layer.1", &x, move |p, x| match place {
        Place::InRecomputed => layer(p, 1, x)?.broadcast_mul(&captured),
        _ => layer(p, 1, x),
    })?;
    let loss = x.sqr()?.mean_all()?;
    match place {
        Place::AfterUnits => loss.broadcast_mul(&scale.squeeze(0)?),
        _ => Ok(loss),
    }
}

#[test]
fn a_gradient_that_nobody_takes_is_refused_and_the_others_are_told() {
    for place in PLACES {
        let ends = common::results(2, |world| {
            let rank = world.rank().index();
            let mut model = sharded(world, layers(2, 4), mesh(2));
            let scale = temperature();
            let on_rank_1 = if rank == 1 { scale.as_tensor().clone() } else { scale.detach() };
            let end = step(&mut model, |pass| scaled(pass, place, &on_rank_1, &input(0, 3, 4)));
            // The model goes on.
            let _ = step(&mut model, |pass| loss_of_layers(pass, 2, &input(rank, 3, 4)))?;
            Ok::<_, Error>(end.map(drop).expect_err("rank 1 has a variable"))
        });
        let [told, refused] =
            &ends.into_iter().map(|it| it.expect("a step")).collect::<Vec<_>>()[..]
        else {
            panic!("two ranks")
        };
        assert!(told.to_string().contains("step 0 aborted by rank 1"), "{place:?}: {told}");
        let message = refused.to_string();
        if place == Place::InRecomputed {
            assert!(
                matches!(refused, Error::LostGradients(LostGradients::History { .. })),
                "{refused:?}"
            );
            assert!(message.contains("variables of the program ([1] of f32)"), "{message}");
        } else {
            assert!(
                matches!(refused, Error::LostGradients(LostGradients::Undeclared { count: 1, .. })),
                "{refused:?}"
            );
            assert!(message.contains("[1] of f32; declare each as a `Param`"), "{message}");
        }
    }
}

#[test]
fn variables_without_a_gradient_are_not_refused() {
    let ends = common::results(2, |world| {
        let mut model = sharded(world, layers(1, 4), mesh(2));
        let rows = Var::new(&[2_u32, 0, 1], &Device::Cpu)?;
        let bound = Var::new(0.1_f32, &Device::Cpu)?;
        let off = temperature();
        step(&mut model, |pass| {
            let x = input(0, 3, 4).index_select(&rows, 0)?;
            let x =
                pass.unit("layer.0", &x, |p, x| layer(p, 0, x)?.broadcast_mul(&off.detach()))?;
            let mask = x.broadcast_gt(&bound)?.to_dtype(DType::F32)?;
            (x * mask)?.sqr()?.mean_all()
        })
        .map(|gradients| gradients.norm())
    });
    for end in ends {
        assert!(end.expect("a step") > 0.0);
    }
}

/// Collectives start from a variable of hsdp, which is none of the program's.
#[test]
fn collectives_of_a_tape_are_not_refused() {
    let ends = common::results(2, |world| {
        let rank = world.rank().index();
        let tape = Tape::of_mesh(&world, mesh(2))?;
        let mut model = sharded(world, layers(1, 4), mesh(2));
        step(&mut model, |pass| {
            let loss = loss_of_layers(pass, 1, &input(rank, 3, 4))?;
            let loss: Dist<Partial, Partial> = tape.assume(loss);
            let loss = loss.all_reduce(OnBoth, Sum).map_err(candle_core::Error::from)?;
            Ok(loss.into_tensor())
        })
        .map(|gradients| gradients.norm())
    });
    for end in ends {
        assert!(end.expect("a step") > 0.0);
    }
}

/// The gradients of an input and a scale in plain candle, with the parameters in `dtype`.
fn plain(precision: Precision, place: Place, x: &Var, scale: &Var) -> Vec<Tensor> {
    let spec = layers(2, 4);
    let all = spec.params().map(|(_, param)| (param.name.clone(), values(param))).collect();
    let plain = Plain::new(spec, &all, precision).expect("values for all");
    let loss = scaled(&plain, place, scale, x).expect("a loss");
    let gradients = loss.backward().expect("plain candle");
    [x, scale].map(|it| gradients.get(it).expect("the loss depends on it").clone()).to_vec()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.flatten_all().and_then(|it| it.to_dtype(DType::F32)?.to_vec1());
    flat.expect("a float")
}

/// Weights and loss scales that are no powers of two do not enter.
#[test]
fn a_gradient_that_is_asked_for_is_that_of_the_loss() {
    for (dtype, place) in [HsdpDType::F32, HsdpDType::BF16]
        .into_iter()
        .flat_map(|dtype| PLACES[..3].iter().map(move |place| (dtype, *place)))
    {
        let precision = Precision::compute_in(dtype);
        let candles = hsdp_candle::candle_dtype(dtype).expect("a float");
        let ends = common::results(2, |world| {
            let rank = world.rank().index();
            let loss_scaling = LossScaling::Fixed(1000.0);
            let options = ModelOptions { precision, loss_scaling, ..ModelOptions::on(mesh(2)) };
            let mut model = sharded_with(world, layers(2, 4), options);
            let x = Var::from_tensor(&input(rank, 3, 4).to_dtype(candles)?)?;
            let scale = Var::from_tensor(&temperature().to_dtype(candles)?)?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let pass = Pass::new(step.microbatch()?)?;
            let gradients = [pass.gradient_of(&x), pass.gradient_of(&scale)];
            let unused = pass.gradient_of(&temperature());
            let loss = scaled(&pass, place, &scale, &x)?;
            assert!(gradients.iter().all(|it| it.get().is_none()), "not before the backward");
            pass.backward(&loss, 3 + rank as u64)?;
            assert!(step.finish()?.norm() > 0.0);
            assert!(unused.get().is_none());
            let got = gradients.map(|it| it.get().expect("the loss depends on it"));
            for (got, want) in got.iter().zip(plain(precision, place, &x, &scale)) {
                assert_eq!((got.dtype(), got.dims()), (want.dtype(), want.dims()));
                for (got, want) in floats(got).into_iter().zip(floats(&want)) {
                    let tolerance = if dtype == HsdpDType::F32 { 1e-6 } else { 0.0 };
                    assert!(
                        (got - want).abs() <= tolerance * want.abs().max(1e-3),
                        "{dtype} {place:?}: {got}, in plain candle {want}"
                    );
                }
            }
            Ok::<_, Error>(())
        });
        ends.into_iter().for_each(|end| end.expect("a step"));
    }
}

#[test]
fn a_microbatch_without_items_has_zeros() {
    let mut model: ShardedModel = sharded(hsdp::World::single(), layers(2, 4), mesh(1));
    let mut step = model.begin_step(StepOptions::microbatches(2)).expect("a step");
    let x = Var::from_tensor(&input(0, 3, 4)).expect("a variable");
    let mut of_weight = |weight| -> VariableGradient {
        let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
        let gradient = pass.gradient_of(&x);
        let loss = loss_of_layers(&pass, 2, &x).expect("a loss");
        pass.backward(&loss, weight).expect("a backward");
        gradient
    };
    let [none, some] = [0, 5].map(|weight| of_weight(weight).get().expect("it is reached"));
    assert_eq!(floats(&none), [0.0; 12]);
    assert!(floats(&some).iter().any(|it| *it != 0.0));
}

#[test]
fn a_loss_of_integers_is_refused() {
    let mut model = sharded(hsdp::World::single(), layers(1, 4), mesh(1));
    let failed =
        step(&mut model, |pass| loss_of_layers(pass, 1, &input(0, 3, 4))?.to_dtype(DType::U32));
    let error = failed.map(drop).expect_err("integers have no gradient").to_string();
    assert_eq!(error, "a loss must be a scalar of a float dtype, this one is [] of u32");
}
