//! Misuse is an error that names the cause, and the runtime's error stays typed.

mod common;

use std::sync::Arc;

use candle_core::Tensor;
use hsdp::{Mesh, StepOptions, World};
use hsdp_candle::{Error, Pass};

use common::{input, layer, layers, loss_of_layers, sharded, step};

fn alone() -> World {
    World::single()
}

fn mesh() -> Mesh {
    Mesh::new(1, 1).expect("one rank")
}

#[test]
fn a_backward_through_the_graph_of_an_older_step_names_both() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let mut old = None;
    let forward = |pass: &Pass<'_>| loss_of_layers(pass, 2, &input(0, 3, 4));
    let _ = step(&mut model, |pass| forward(pass).inspect(|loss| old = Some(loss.clone())))
        .expect("a step");

    let mut next = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    let pass = Pass::new(next.microbatch().expect("a microbatch")).expect("a pass");
    let error = pass.backward(&old.expect("it was computed"), 1).expect_err("it is of step 0");
    assert!(matches!(error, Error::Runtime(hsdp::Error::StalePass { .. })), "{error}");
    let message = error.to_string();
    assert!(message.contains("step 0") && message.contains("step 1"), "{message}");
}

#[test]
fn a_parameter_that_was_carried_out_of_its_unit_cannot_be_read() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let failed = step(&mut model, |pass| {
        let mut weight = None;
        let x = pass.unit("layer.0", &input(0, 4, 4), |p, x| {
            weight = Some(p.get("layer.0.weight")?);
            layer(p, 0, x)
        })?;
        x.matmul(&weight.expect("it was read"))
    });
    let error = failed.expect_err("the weight is freed");
    assert!(matches!(error, Error::Resharded { op: "matmul" }), "{error}");
}

#[test]
fn a_unit_that_is_needed_again_must_be_kept() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let failed = step(&mut model, |pass| {
        let x = pass.unit("layer.0", &input(0, 4, 4), |p, x| layer(p, 0, x))?;
        Ok(pass.unit("layer.0", &x, |p, x| layer(p, 0, x))?)
    });
    let error = failed.expect_err("it was freed");
    assert!(matches!(&error, Error::Freed { unit } if unit == "layer.0"), "{error}");
}

#[test]
fn what_the_model_does_not_have_is_named() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let read = |unit: &'static str, name: &'static str| {
        move |pass: &Pass<'_>| -> candle_core::Result<Tensor> {
            Ok(pass.unit(unit, &input(0, 4, 4), |p, x| x.matmul(&p.get(name)?))?)
        }
    };
    let error = step(&mut model, read("layer.7", "layer.0.weight")).expect_err("no such unit");
    assert_eq!(error.to_string(), "the model has no unit layer.7, it has layer.0, layer.1");
    let error = step(&mut model, read("layer.1", "layer.1.wieght")).expect_err("no such parameter");
    assert_eq!(
        error.to_string(),
        "unit layer.1 reads parameter layer.1.wieght, which the model does not have"
    );
}

#[test]
fn an_error_of_the_forward_comes_back_as_it_is() {
    let mut model = sharded(alone(), layers(1, 4), mesh());
    let failed = step(&mut model, |pass| {
        Ok(pass.unit("layer.0", &input(0, 4, 4), |_, _| candle_core::bail!("the model's own"))?)
    });
    let error = failed.expect_err("the forward failed");
    assert!(matches!(&error, Error::Candle(_)), "{error:?}");
    assert!(error.to_string().contains("the model's own"), "{error}");
}

#[test]
fn a_failed_step_leaves_the_model_usable() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let _ = step(&mut model, |_| candle_core::bail!("the model's own"))
        .expect_err("the forward failed");
    let gradients = step(&mut model, |pass| loss_of_layers(pass, 2, &input(0, 3, 4)));
    assert!(gradients.expect("a clean step").norm() > 0.0);
}

#[test]
fn a_loss_over_nothing_counts_for_nothing() {
    let results = hsdp::world(2, |world| {
        let rank = world.rank().index();
        let mut model = sharded(world, layers(1, 4), Mesh::new(1, 2).expect("two shards"));
        let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
        let mean = loss_of_layers(&pass, 1, &input(1, 3, 4)).expect("a forward");
        // Rank 0 has no items: its mean is NaN.
        let mean = if rank == 0 { (mean * f64::NAN).expect("a scalar") } else { mean };
        pass.backward(&mean, rank as u64).expect("a backward");
        step.finish().expect("finite gradients").norm()
    });
    assert!(results[0] > 0.0 && results[0] == results[1], "{results:?}");
}

#[test]
fn a_backward_of_candle_is_told_that_the_pass_has_one() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    for recomputed in [false, true] {
        let failed = step(&mut model, |pass| {
            let loss = match recomputed {
                false => loss_of_layers(pass, 2, &input(0, 3, 4))?,
                true => pass
                    .recomputed("layer.1", &input(0, 3, 4), Arc::new(|p, x| layer(p, 1, x)))?
                    .sqr()?
                    .mean_all()?,
            };
            loss.backward()?;
            Ok(loss)
        });
        let error = failed.expect_err("the pass has not begun its backward");
        assert!(matches!(&error, Error::TensorBackward { unit } if unit == "layer.1"), "{error:?}");
        assert_eq!(
            error.to_string(),
            "a gradient came to unit layer.1 outside of the backward of its pass: call \
             Pass::backward, not Tensor::backward"
        );
    }
}
