//! Parameters that are read twice, or not at all, or are not trained; units that run twice.

use candle_core::{Result, Tensor};
use hsdp::{Mesh, ModelOptions, ModelSpec, Param, Unit, Unused};
use hsdp_candle::{Parameters, Units, UnitsExt};

use crate::common::{
    self, assert_same_bits, input, layer, layer_unit, layers, plain_gradients, sharded,
    sharded_with, step,
};

/// The gradients of one step on two shards that read the same input, which are those of plain
/// candle on one.
fn assert_same_as_plain(spec: &ModelSpec, loss: fn(&dyn Units) -> Result<Tensor>) {
    let want = plain_gradients(spec, |plain| loss(plain));
    common::results(2, |world| {
        let on = ModelOptions::on(Mesh::new(1, 2).expect("two shards"));
        let options = ModelOptions { unused: Unused::Zeros, ..on };
        let mut model = sharded_with(world, spec.clone(), options);
        let gradients = step(&mut model, |pass| loss(pass)).expect("a step");
        let mut got = gradients.full(&model).expect("a gather");
        for (id, param) in spec.params() {
            // A parameter without a gradient in candle has zeros here, and is known to have no
            // gradient.
            if !want.contains_key(&param.name) {
                let zeros = got.remove(&param.name).unwrap_or_default();
                assert!(zeros.iter().all(|value| *value == 0.0), "{}: {zeros:?}", param.name);
            }
            assert_eq!(
                gradients.has_gradient(id),
                want.contains_key(&param.name),
                "{}",
                param.name
            );
        }
        assert_same_bits(&got, &want);
    });
}

fn square(units: &dyn Units, unit: &str, weight: &str, x: &Tensor) -> Result<Tensor> {
    units.unit(unit, x, |p, x| x.matmul(&p.get(weight)?.t()?)?.tanh())
}

/// `layer.0`, which is kept, `layer.1`, and `head`, whose weight is that of the first.
fn tied() -> ModelSpec {
    ModelSpec::new()
        .unit(layer_unit(0, 4).keep())
        .unit(layer_unit(1, 4))
        .unit(Unit::new("head").param(Param::new("head.bias", [4])))
        .tie("head.weight", "layer.0.weight")
}

#[test]
fn a_tied_weight_that_another_unit_reads_is_one_tensor() {
    assert_same_as_plain(&tied(), |units| {
        let x = square(units, "layer.0", "layer.0.weight", &input(0, 3, 4))?;
        let x = square(units, "layer.1", "layer.1.weight", &x)?;
        let head = |p: &dyn Parameters, x: &Tensor| {
            x.matmul(&p.get("head.weight")?.t()?)?.broadcast_add(&p.get("head.bias")?)
        };
        units.unit("head", &x, |p, x| head(p, x))?.sqr()?.mean_all()
    });
}

#[test]
fn a_tied_weight_that_its_own_unit_reads_again_is_one_tensor() {
    assert_same_as_plain(&tied(), |units| {
        let x = square(units, "layer.0", "layer.0.weight", &input(0, 3, 4))?;
        let x = square(units, "layer.1", "layer.1.weight", &x)?;
        square(units, "layer.0", "head.weight", &x)?.sqr()?.mean_all()
    });
}

#[test]
fn a_parameter_that_one_forward_reads_twice_is_one_tensor() {
    assert_same_as_plain(&layers(1, 4), |units| {
        let output = units.unit("layer.0", &input(0, 3, 4), |p, x| {
            let one = p.get("layer.0.weight")?;
            let two = p.get("layer.0.weight")?;
            assert_eq!(one.id(), two.id());
            x.matmul(&one)?.matmul(&two.t()?)?.broadcast_add(&p.get("layer.0.bias")?)
        })?;
        output.sqr()?.mean_all()
    });
}

#[test]
fn a_kept_unit_may_run_twice() {
    let spec = ModelSpec::new().unit(layer_unit(0, 4).keep()).unit(layer_unit(1, 4));
    assert_same_as_plain(&spec, |units| {
        let mut x = input(0, 3, 4);
        for index in [0, 1, 0] {
            x = units.unit(&format!("layer.{index}"), &x, |p, x| layer(p, index, x))?;
        }
        x.sqr()?.mean_all()
    });
}

#[test]
fn what_the_loss_does_not_need_gets_no_gradient() {
    // layer.0's bias is never read; layer.1 is read, and its output dropped; layer.2 does not run.
    assert_same_as_plain(&layers(4, 4), |units| {
        let x = square(units, "layer.0", "layer.0.weight", &input(0, 3, 4))?;
        units.unit("layer.1", &x, |p, x| layer(p, 1, x))?;
        units.unit("layer.3", &x, |p, x| layer(p, 3, x))?.sqr()?.mean_all()
    });
}

#[test]
fn an_input_that_the_forward_does_not_differentiate_gets_zeros() {
    // layer.1 reads only the size of its input, and candle panics if no op gives the input's
    // gradient. So layer.0 gets zeros, where plain candle would give it no gradient.
    let loss = |units: &dyn Units| {
        let x = units.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        units.unit("layer.1", &x, |p, x| layer(p, 1, &x.zeros_like()?))?.sqr()?.mean_all()
    };
    let mut want = plain_gradients(&layers(2, 4), |plain| loss(plain));
    want.insert("layer.0.weight".to_owned(), vec![0.0; 16]);
    want.insert("layer.0.bias".to_owned(), vec![0.0; 4]);
    common::results(2, |world| {
        let on = ModelOptions::on(Mesh::new(1, 2).expect("two shards"));
        let options = ModelOptions { unused: Unused::Zeros, ..on };
        let mut model = sharded_with(world, layers(2, 4), options);
        let gradients = step(&mut model, |pass| loss(pass)).expect("a step");
        assert_same_bits(&gradients.full(&model).expect("a gather"), &want);
    });
}

#[test]
fn frozen_parameters_stay_until_the_backward_has_passed_them() {
    // In each unit the frozen weight is read before the trainable bias is: its backward comes after
    // the bias's.
    let frozen = |index: usize| {
        Unit::new(format!("layer.{index}"))
            .param(Param::new(format!("layer.{index}.weight"), [4, 4]).frozen())
            .param(Param::new(format!("layer.{index}.bias"), [4]))
    };
    let spec = ModelSpec::new().unit(layer_unit(0, 4)).unit(frozen(1)).unit(frozen(2));
    let want = plain_gradients(&spec, |plain| common::loss_of_layers(plain, 3, &input(0, 3, 4)));
    common::results(2, |world| {
        let mut model = sharded(world, spec.clone(), Mesh::new(1, 2).expect("two shards"));
        let gradients = step(&mut model, |pass| common::loss_of_layers(pass, 3, &input(0, 3, 4)))
            .expect("a step");
        let got = gradients.full(&model).expect("a gather");
        assert!(!got.contains_key("layer.1.weight"), "frozen parameters have no gradient");
        let trained = want.iter().filter(|(name, _)| got.contains_key(*name));
        assert_same_bits(
            &got,
            &trained.map(|(name, values)| (name.clone(), values.clone())).collect(),
        );
    });
}

#[test]
fn a_unit_without_trainable_parameters() {
    let frozen = Unit::new("frozen").param(Param::new("frozen.weight", [4, 4]).frozen());
    let spec = ModelSpec::new().unit(layer_unit(0, 4)).unit(frozen).unit(layer_unit(1, 4));
    let loss = |units: &dyn Units| {
        let x = units.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        let x = square(units, "frozen", "frozen.weight", &x)?;
        units.unit("layer.1", &x, |p, x| layer(p, 1, x))?.sqr()?.mean_all()
    };
    let mut want = plain_gradients(&spec, |plain| loss(plain));
    want.remove("frozen.weight");
    common::results(2, |world| {
        let mut model = sharded(world, spec.clone(), Mesh::new(1, 2).expect("two shards"));
        let gradients = step(&mut model, |pass| loss(pass)).expect("a step");
        assert_same_bits(&gradients.full(&model).expect("a gather"), &want);
    });
}

#[test]
fn a_frozen_parameter_that_two_units_read_stays_for_both() {
    // The backward of layer.0, whose input is not differentiated, reads the parameter that the
    // backward of `scale`, which is over by then, has released.
    let scale = Unit::new("scale").param(Param::new("scale.weight", [4]).frozen()).keep();
    let spec = ModelSpec::new().unit(layer_unit(0, 4)).unit(scale);
    let loss = |units: &dyn Units| {
        let scaled = |p: &dyn Parameters, x: &Tensor| x.broadcast_mul(&p.get("scale.weight")?);
        let x = units.unit("layer.0", &input(0, 3, 4), |p, x| scaled(p, &layer(p, 0, x)?))?;
        units.unit("scale", &x, |p, x| scaled(p, x))?.sqr()?.mean_all()
    };
    let mut want = plain_gradients(&spec, |plain| loss(plain));
    want.remove("scale.weight");
    common::results(2, |world| {
        let mut model = sharded(world, spec.clone(), Mesh::new(1, 2).expect("two shards"));
        let gradients = step(&mut model, |pass| loss(pass)).expect("a step");
        assert_same_bits(&gradients.full(&model).expect("a gather"), &want);
    });
}

#[test]
fn ranks_may_skip_different_units() {
    // Rank 0 does not run layer.1, rank 1 not layer.2; neither waits for the other forever.
    common::results(2, |world| {
        let rank = world.rank().index();
        let mut model = sharded(world, layers(3, 4), Mesh::new(1, 2).expect("two shards"));
        for _ in 0..3 {
            let gradients = step(&mut model, |pass| {
                let x = pass.unit("layer.0", &input(rank, 3, 4), |p, x| layer(p, 0, x))?;
                let own = 2 - rank;
                let y = pass.unit(&format!("layer.{own}"), &x, |p, x| layer(p, own, x))?;
                y.sqr()?.mean_all()
            });
            assert!(gradients.expect("a step").norm() > 0.0);
        }
    });
}
