//! Collectives are issued in the plan's order, wherever in an expression a weight stands.

use candle_core::{Result, Tensor};
use hsdp::{Mesh, ModelOptions, Unused, World};
use hsdp_candle::{Pass, UnitsExt};

use crate::common::{self, input, layers, sharded_with, step, words};

#[derive(Clone, Copy, Debug)]
enum Side {
    Left,
    Right,
    Both,
}

fn loss(pass: &Pass<'_>, side: Side) -> Result<Tensor> {
    let mut x = input(0, 4, 4);
    for layer in 0..3 {
        x = pass.unit(&format!("layer.{layer}"), &x, |p, x| {
            let weight = p.get(&format!("layer.{layer}.weight"))?;
            match side {
                Side::Left => weight.matmul(x)?.tanh(),
                Side::Right => x.matmul(&weight)?.tanh(),
                Side::Both => {
                    let again = p.get(&format!("layer.{layer}.weight"))?;
                    weight.matmul(x)?.matmul(&again)?.tanh()
                }
            }
        })?;
    }
    x.sqr()?.mean_all()
}

fn events(world: World, side: Side) -> Vec<String> {
    let on = ModelOptions::on(Mesh::new(1, 2).expect("two shards"));
    // No unit uses its bias.
    let mut model = sharded_with(world, layers(3, 4), ModelOptions { unused: Unused::Zeros, ..on });
    model.record_events();
    let _ = step(&mut model, |pass| loss(pass, side)).expect("a step");
    words(&model.take_events())
}

#[test]
fn a_weight_on_either_side_of_a_matmul_gives_the_same_events() {
    // One unit ahead: layer 2's last gather of the forward is followed by its first of the
    // backward, and each reduction comes before the next unit is asked for.
    let want = [
        "gather 0 forward",
        "gather 1 forward",
        "gather 2 forward",
        "gather 2 backward",
        "gather 1 backward",
        "reduce 2",
        "gather 0 backward",
        "reduce 1",
        "reduce 0",
    ];
    for side in [Side::Left, Side::Right, Side::Both] {
        for events in common::results(2, |world| events(world, side)) {
            assert_eq!(events, want, "{side:?}");
        }
    }
}
