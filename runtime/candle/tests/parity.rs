//! A sharded backward gives the gradients of plain candle, bit by bit, if these are added in the
//! same order.

mod common;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};
use hsdp::{DType as HsdpDType, Mesh, ModelOptions, ModelSpec, Precision, World};
use hsdp_candle::Units;
use hsdp_candle::gpt::{Gpt, GptConfig};

use common::{
    assert_same_bits, input, layers, loss_of_layers, mean, plain_gradients, sharded, step,
};

type Loss = fn(&dyn Units, usize) -> Result<Tensor>;

/// Every rank's gradients in full, from a sharded step.
fn sharded_gradients(mesh: Mesh, spec: &ModelSpec, loss: Loss) -> Vec<BTreeMap<String, Vec<f32>>> {
    hsdp::world(mesh.world_size(), |world: World| {
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

const TINY: GptConfig = GptConfig { vocab: 11, context: 6, width: 8, heads: 2, layers: 2 };

#[test]
fn a_gpt_on_two_replicas_of_two_shards() {
    assert_parity("2x2", &TINY.spec(), |units, rank| {
        let shift = u32::try_from(rank).expect("four ranks");
        let tokens: Vec<u32> = (0..12).map(|i| (i * 5 + shift) % 11).collect();
        let tokens = Tensor::from_vec(tokens, (2, 6), &Device::Cpu)?;
        Gpt::new(TINY).expect("sizes that fit").loss(units, &tokens, &tokens.flip(&[1])?)
    });
}

#[test]
fn a_weight_on_the_left_of_a_matmul() {
    assert_parity("1x2", &layers(2, 4), |units, rank| {
        let mut x = input(rank, 4, 4);
        for layer in 0..2 {
            x = units.unit(&format!("layer.{layer}"), &x, &mut |p, x| {
                p.get(&format!("layer.{layer}.weight"))?
                    .matmul(x)?
                    .broadcast_add(&p.get(&format!("layer.{layer}.bias"))?)
            })?;
        }
        x.sqr()?.mean_all()
    });
}

#[test]
fn parameters_come_in_the_compute_dtype_and_outputs_leave_in_theirs() {
    let precision = Precision {
        parameters: HsdpDType::BF16,
        output: Some(HsdpDType::F32),
        ..Precision::default()
    };
    hsdp::world(2, |world| {
        let mesh = Mesh::new(1, 2).expect("two ranks");
        let options = ModelOptions { precision, ..ModelOptions::on(mesh) };
        let mut model = common::sharded_with(world, layers(1, 4), options);
        let gradients = step(&mut model, |pass| {
            let x = input(0, 2, 4).to_dtype(DType::BF16)?;
            let y = pass.unit("layer.0", &x, |p, x| common::layer(p, 0, x))?;
            assert_eq!(y.dtype(), DType::BF16);
            let y = pass.output(&y)?;
            assert_eq!(y.dtype(), DType::F32);
            y.sqr()?.mean_all()
        });
        assert!(gradients.expect("a step").norm() > 0.0);
    });
}
