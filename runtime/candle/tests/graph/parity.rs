//! A sharded backward gives the gradients of plain candle, bit by bit, if these are added in the
//! same order.

use candle_core::{DType, Result, Tensor};
use hsdp::{
    Accumulation, DType as HsdpDType, LossScaling, Mesh, ModelOptions, ModelSpec, Precision, World,
};
use hsdp_candle::{Units, UnitsExt};

use crate::common::{
    self, Named, assert_same_bits, divided, input, layers, loss_of_layers, mean, plain_gradients,
    plain_gradients_in, sharded, sharded_with, step, step_of, sum,
};

type Loss = fn(&dyn Units, usize) -> Result<Tensor>;

/// Every rank's gradients in full, from a sharded step.
fn sharded_gradients(mesh: Mesh, spec: &ModelSpec, loss: Loss) -> Vec<Named> {
    common::results(mesh.world_size(), |world: World| {
        let rank = world.rank().index();
        let mut model = sharded(world, spec.clone(), mesh);
        let gradients = step(&mut model, |pass| loss(pass, rank)).expect("a step");
        gradients.full(&model).expect("a gather")
    })
}

fn assert_parity(mesh: &str, spec: &ModelSpec, loss: Loss) {
    let mesh: Mesh = mesh.parse().expect("a mesh");
    let parts: Vec<_> = (0..mesh.world_size())
        .map(|rank| plain_gradients(spec, |plain| loss(plain, rank)))
        .collect();
    let want = mean(mesh, &parts);
    for got in sharded_gradients(mesh, spec, loss) {
        assert_same_bits(&got, &want);
    }
}

#[test]
fn layers_on_every_kind_of_mesh() {
    for mesh in ["1x1", "1x2", "2x1", "1x3", "2x2"] {
        assert_parity(mesh, &layers(3, 5), |units, rank| {
            loss_of_layers(units, 3, &input(rank, 4, 5))
        });
    }
}

#[test]
fn a_weight_on_the_left_of_a_matmul() {
    assert_parity("1x2", &layers(2, 4), |units, rank| {
        let mut x = input(rank, 4, 4);
        for layer in 0..2 {
            x = units.unit(&format!("layer.{layer}"), &x, |p, x| {
                p.get(&format!("layer.{layer}.weight"))?
                    .matmul(x)?
                    .broadcast_add(&p.get(&format!("layer.{layer}.bias"))?)
            })?;
        }
        x.sqr()?.mean_all()
    });
}

/// The sum of all ranks' microbatches, in the order of the accumulation mode.
fn total(mode: Accumulation, microbatches: usize, part: &dyn Fn(usize, usize) -> Named) -> Named {
    // 2 x 2: each row shards, and the rows are replicas.
    let rows = || [[0, 1], [2, 3]].into_iter();
    let row = |microbatch, row: [usize; 2]| sum(row.into_iter().map(|rank| part(microbatch, rank)));
    match mode {
        Accumulation::ReduceScatter => {
            sum(rows().map(|ranks| sum((0..microbatches).map(|number| row(number, ranks)))))
        }
        Accumulation::Every => {
            sum((0..microbatches).map(|number| sum(rows().map(|ranks| row(number, ranks)))))
        }
        Accumulation::Local => {
            let of = |rank| sum((0..microbatches).map(|number| part(number, rank)));
            sum(rows().map(|ranks| sum(ranks.into_iter().map(of))))
        }
    }
}

#[test]
fn every_mode_of_accumulation() {
    const MICROBATCHES: usize = 3;
    let mesh = Mesh::new(2, 2).expect("four ranks");
    let spec = layers(3, 5);
    let loss = |units: &dyn Units, microbatch: usize, rank: usize| {
        loss_of_layers(units, 3, &input(rank + 4 * microbatch, 4, 5))
    };
    let part = |microbatch, rank| plain_gradients(&spec, |plain| loss(plain, microbatch, rank));
    for accumulation in Accumulation::ALL {
        let want = divided(&total(accumulation, MICROBATCHES, &part), 4.0 * MICROBATCHES as f64);
        common::results(4, |world| {
            let rank = world.rank().index();
            let options = ModelOptions { accumulation, ..ModelOptions::on(mesh) };
            let mut model = sharded_with(world, spec.clone(), options);
            let gradients =
                step_of(&mut model, MICROBATCHES, |pass, microbatch| loss(pass, microbatch, rank));
            let got = gradients.and_then(|gradients| Ok(gradients.full(&model)?));
            assert_same_bits(&got.expect("a step"), &want);
        });
    }
}

#[test]
fn f16_parameters_with_a_loss_scale() {
    const SCALE: f64 = 1024.0;
    let mesh = Mesh::new(2, 2).expect("four ranks");
    let spec = layers(3, 5);
    let precision = Precision::compute_in(HsdpDType::F16);
    let loss = |units: &dyn Units, rank: usize| {
        loss_of_layers(units, 3, &input(rank, 4, 5).to_dtype(DType::F16)?)
    };
    let part = |rank| plain_gradients_in(precision, &spec, |plain| loss(plain, rank)? * SCALE);
    let want = divided(&mean(mesh, &[0, 1, 2, 3].map(part)), SCALE);
    common::results(4, |world| {
        let rank = world.rank().index();
        let loss_scaling = LossScaling::Fixed(SCALE);
        let options = ModelOptions { precision, loss_scaling, ..ModelOptions::on(mesh) };
        let mut model = sharded_with(world, spec.clone(), options);
        let gradients = step(&mut model, |pass| loss(pass, rank)).expect("a step");
        assert_same_bits(&gradients.full(&model).expect("a gather"), &want);
    });
}

#[test]
fn parameters_come_in_the_compute_dtype_and_outputs_leave_in_theirs() {
    let precision = Precision {
        parameters: HsdpDType::BF16,
        output: Some(HsdpDType::F32),
        ..Precision::default()
    };
    // The same loss runs on sharded and on whole parameters.
    let loss = |units: &dyn Units| {
        let x = input(0, 2, 4).to_dtype(DType::BF16)?;
        let y = units.unit("layer.0", &x, |p, x| common::layer(p, 0, x))?;
        assert_eq!(y.dtype(), DType::BF16);
        let y = units.output(&y)?;
        assert_eq!(y.dtype(), DType::F32);
        y.sqr()?.mean_all()
    };
    let want = plain_gradients_in(precision, &layers(1, 4), |plain| loss(plain));
    common::results(2, |world| {
        let mesh = Mesh::new(1, 2).expect("two ranks");
        let options = ModelOptions { precision, ..ModelOptions::on(mesh) };
        let mut model = sharded_with(world, layers(1, 4), options);
        let gradients = step(&mut model, |pass| loss(pass)).expect("a step");
        assert_same_bits(&gradients.full(&model).expect("a gather"), &want);
    });
}
