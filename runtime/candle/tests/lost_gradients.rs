//! Layers without a backward are named, and the failure of one rank reaches the others.

mod common;

use candle_core::{D, Tensor};
use candle_nn::ops::{layer_norm, rms_norm, softmax_last_dim};
use hsdp::{Mesh, ModelOptions, StepOptions, Unused};
use hsdp_candle::{Error, Pass};

use common::{input, layer, layers, loss_of_layers, sharded, sharded_with, step};

fn mesh() -> Mesh {
    Mesh::new(1, 2).expect("two shards")
}

/// A softmax of candle_nn after the second layer: the first two get no gradient, and the loss still falls.
#[test]
fn parameters_before_a_layer_without_a_backward_are_named_with_the_cause() {
    for unused in [Unused::default(), Unused::ErrorOnAnyRank] {
        let ends = hsdp::world(2, |world| {
            let options = ModelOptions { unused, ..ModelOptions::on(mesh()) };
            let mut model = sharded_with(world, layers(3, 4), options);
            step(&mut model, |pass| {
                let x = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
                let x = pass.unit("layer.1", &x, |p, x| softmax_last_dim(&layer(p, 1, x)?))?;
                pass.unit("layer.2", &x, |p, x| layer(p, 2, x))?.sqr()?.mean_all()
            })
            .map(drop)
        });
        let names = ["layer.0.weight", "layer.0.bias", "layer.1.weight", "layer.1.bias"];
        let named = match unused {
            Unused::ErrorOnAnyRank => {
                let named = |name| format!("parameter {name} got no gradient on ranks [0, 1]");
                names.map(named).join("; ")
            }
            _ => {
                let head = "4 of 6 trainable parameters got no gradient on any rank";
                format!("{head}: {}. ", names.join(", "))
            }
        };
        let errors: Vec<_> = ends
            .into_iter()
            .map(|end| end.expect_err("gradients are missing").to_string())
            .collect();
        assert_eq!(errors[0], errors[1]);
        let error = &errors[0];
        assert!(error.starts_with(&format!("step 0: {named}")), "{error}");
        assert!(error.contains("softmax_last_dim") && error.contains("hsdp_models::nn"), "{error}");
    }
}

/// The operations that the message names are those that cut gradients.
#[test]
fn the_named_operations_have_no_backward() {
    let x = candle_core::Var::from_tensor(&input(0, 2, 4)).expect("a variable");
    let ones = Tensor::ones(4, candle_core::DType::F32, x.device()).expect("ones");
    let (table, rows) = (Tensor::ones((2, 2), x.dtype(), x.device()).expect("ones"), (1, 1, 2, 4));
    let wide = x.reshape(rows).expect("four dims");
    let thd = x.reshape((1, 2, 1, 4)).expect("four dims");
    let cut = [
        softmax_last_dim(&x),
        rms_norm(&x, &ones, 1e-5),
        layer_norm(&x, &ones, &ones, 1e-5),
        candle_nn::rotary_emb::rope(&wide, &table, &table),
        candle_nn::rotary_emb::rope_i(&wide, &table, &table),
        candle_nn::rotary_emb::rope_thd(&thd, &table, &table),
    ];
    for (place, output) in cut.into_iter().enumerate() {
        let output = output.expect("a forward");
        assert!(!output.track_op(), "operation {place} has a history: take it off the list");
    }
    let kept = candle_nn::ops::softmax(&x, D::Minus1).expect("a forward");
    assert!(kept.track_op());
}

#[test]
fn an_error_in_a_forward_reaches_the_other_ranks_with_rank_and_unit() {
    let ends = hsdp::world(2, |world| {
        let rank = world.rank().index();
        let mut model = sharded(world, layers(2, 4), mesh());
        let end = step(&mut model, |pass| {
            let x = pass.unit("layer.0", &input(rank, 3, 4), |p, x| layer(p, 0, x))?;
            let x = pass.unit("layer.1", &x, |p, x| match rank {
                1 => candle_core::bail!("the mask has 7 columns"),
                _ => layer(p, 1, x),
            })?;
            x.sqr()?.mean_all()
        });
        // The model goes on.
        let _ = step(&mut model, |pass| loss_of_layers(pass, 2, &input(rank, 3, 4)))?;
        Ok::<_, Error>(end.map(drop).expect_err("rank 1 has failed").to_string())
    });
    let [told, failed] = &ends.into_iter().map(|end| end.expect("a step")).collect::<Vec<_>>()[..]
    else {
        panic!("two ranks")
    };
    assert!(failed.contains("the mask has 7 columns"), "{failed}");
    let expected = "step 0 aborted by rank 1: unit layer.1: the mask has 7 columns";
    assert!(told.contains(expected), "{told}");
}

#[test]
fn an_error_in_a_backward_reaches_the_other_ranks() {
    let ends = hsdp::world(2, |world| {
        let rank = world.rank().index();
        let mut model = sharded(world, layers(2, 4), mesh());
        let mut begin = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        let pass = Pass::new(begin.microbatch().expect("a microbatch")).expect("a pass");
        let loss = loss_of_layers(&pass, 2, &input(rank, 3, 4)).expect("a forward");
        // A loss of two elements is no scalar.
        let loss = if rank == 1 { Tensor::stack(&[&loss, &loss], 0).expect("two") } else { loss };
        let end = pass.backward(&loss, 1).map(drop);
        end.and_then(|()| begin.finish().map(drop).map_err(Error::from))
            .expect_err("rank 1 has failed")
            .to_string()
    });
    assert!(ends[0].contains("step 0 aborted by rank 1: backward: "), "{}", ends[0]);
}

#[test]
fn a_backward_of_candle_is_told_to_the_other_ranks() {
    let ends = hsdp::world(2, |world| {
        let rank = world.rank().index();
        let mut model = sharded(world, layers(2, 4), mesh());
        step(&mut model, |pass| {
            let loss = loss_of_layers(pass, 2, &input(rank, 3, 4))?;
            if rank == 1 {
                loss.backward()?;
            }
            Ok(loss)
        })
        .map(drop)
        .expect_err("rank 1 has failed")
        .to_string()
    });
    assert!(
        ends[0].contains("aborted by rank 1") && ends[0].contains("Pass::backward"),
        "{}",
        ends[0]
    );
}
