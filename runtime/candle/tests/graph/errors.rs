//! Misuse is an error that names the cause, and the runtime's error stays typed.

use std::sync::{Arc, Mutex};

use candle_core::Tensor;
use hsdp::{Mesh, ModelSpec, Param, StepOptions, Unit, World};
use hsdp_candle::{Error, LostGradients, Parameters, Pass, Units, UnitsExt};

use crate::common::{self, input, layer, layers, loss_of_layers, sharded, step};

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
        pass.unit("layer.0", &x, |p, x| layer(p, 0, x))
    });
    let error = failed.expect_err("it was freed");
    assert!(matches!(&error, Error::Freed { unit } if unit == "layer.0"), "{error}");
}

#[test]
fn what_the_model_does_not_have_is_named() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let read = |unit: &'static str, name: &'static str| {
        move |pass: &Pass<'_>| -> candle_core::Result<Tensor> {
            pass.unit(unit, &input(0, 4, 4), |p, x| x.matmul(&p.get(name)?))
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
        pass.unit("layer.0", &input(0, 4, 4), |_, _| candle_core::bail!("the model's own"))
    });
    let error = failed.expect_err("the forward failed");
    assert!(matches!(&error, Error::Candle(_)), "{error:?}");
    assert_eq!(error.to_string(), "unit layer.0: the model's own");
}

#[test]
fn an_error_of_candle_names_the_unit_whose_forward_failed() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    for recomputed in [false, true] {
        let failed = step(&mut model, |pass| {
            let x = input(0, 4, 5);
            let forward = |p: &dyn Parameters, x: &Tensor| layer(p, 1, x);
            match recomputed {
                false => pass.unit("layer.1", &x, forward),
                true => pass.recomputed("layer.1", &x, forward),
            }
        });
        let error = failed.expect_err("the input is too wide");
        let told = error.to_string();
        assert!(told.starts_with("unit layer.1: shape mismatch in matmul"), "{told}");
        let Error::Candle(candle_core::Error::Context { inner, .. }) = error else {
            panic!("{error:?}")
        };
        assert!(
            matches!(*inner, candle_core::Error::ShapeMismatchBinaryOp { .. }),
            "{inner:?}, recomputed {recomputed}"
        );
    }
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
    let results = common::results(2, |world| {
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
                    .recomputed("layer.1", &input(0, 3, 4), |p, x| layer(p, 1, x))?
                    .sqr()?
                    .mean_all()?,
            };
            loss.backward()?;
            Ok(loss)
        });
        let error = failed.expect_err("the pass has not begun its backward");
        assert!(
            matches!(&error, Error::LostGradients(LostGradients::TensorBackward { unit }) if unit == "layer.1"),
            "{error:?}"
        );
        assert_eq!(
            error.to_string(),
            "a gradient came to unit layer.1 outside of the backward of its pass: call \
             Pass::backward, not Tensor::backward"
        );
    }
}

/// Runs two layers of each of two models in one step, one after the other, and then the backward of
/// the first model's pass.
fn through_both(
    second: ModelSpec,
    run: impl FnOnce(&Pass<'_>, &Pass<'_>) -> candle_core::Result<Tensor>,
) -> Error {
    let mut models = [sharded(alone(), layers(2, 4), mesh()), sharded(alone(), second, mesh())];
    let [mut first, mut second] = models
        .each_mut()
        .map(|model| model.begin_step(StepOptions::microbatches(1)).expect("a step"));
    let first = Pass::new(first.microbatch().expect("a microbatch")).expect("a pass");
    let second = Pass::new(second.microbatch().expect("a microbatch")).expect("a pass");
    let loss = run(&first, &second).expect("a forward");
    first.backward(&loss, 1).expect_err("it depends on another pass")
}

#[test]
fn a_loss_through_another_pass_says_so() {
    let frozen = |unit: &Unit| {
        let mut unit = unit.clone();
        unit.params = unit.params.into_iter().map(Param::frozen).collect();
        unit
    };
    let frozen = layers(2, 4).units().iter().map(frozen).fold(ModelSpec::new(), ModelSpec::unit);
    for second in [layers(2, 4), frozen] {
        let error = through_both(second, |first, second| {
            let x = first.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
            loss_of_layers(second, 2, &x)
        });
        assert!(
            matches!(&error, Error::LostGradients(LostGradients::OtherPass { .. })),
            "{error:?}"
        );
        let message = error.to_string();
        assert!(
            message.starts_with("the loss depends on unit layer.1 through another pass"),
            "{message}"
        );
        assert!(message.contains("one `ModelSpec`"), "{message}");
    }
}

#[test]
fn a_recomputed_unit_of_another_pass_says_so() {
    let error = through_both(layers(2, 4), |_, second| {
        let layer = |p: &dyn Parameters, x: &Tensor| layer(p, 1, x);
        second.recomputed("layer.1", &input(0, 3, 4), layer)?.sqr()?.mean_all()
    });
    assert!(matches!(&error, Error::LostGradients(LostGradients::OtherPass { .. })), "{error:?}");
}

/// An activation that a unit captures from another unit: `unit` takes its gradient, `recomputed`
/// cannot.
#[test]
fn a_recomputed_unit_that_captures_an_activation_names_it_and_unit_takes_it() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let mut skipped = |recomputed: bool| {
        step(&mut model, |pass| {
            let h = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
            let skip = h.clone();
            let forward = move |p: &dyn Parameters, x: &Tensor| layer(p, 1, x)? + &skip;
            let units: &dyn Units = pass;
            let y = match recomputed {
                true => units.recomputed("layer.1", &h.tanh()?, forward)?,
                false => units.unit("layer.1", &h.tanh()?, forward)?,
            };
            y.sqr()?.mean_all()
        })
    };
    let error = skipped(true).map(drop).expect_err("its gradient would be lost");
    assert!(matches!(&error, Error::LostGradients(LostGradients::History { .. })), "{error:?}");
    let message = error.to_string();
    assert!(message.contains("depends on tensors computed from the parameters"), "{message}");
    assert!(message.contains("run it with `unit`"), "{message}");
    assert!(skipped(false).expect("a step").norm() > 0.0);
}

/// A captured mask has no gradient, so nothing is lost.
#[test]
fn a_recomputed_unit_may_capture_a_mask_that_was_computed() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let gradients = step(&mut model, |pass| {
        let h = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        let mask = h.gt(0.0)?.to_dtype(h.dtype())?;
        let forward = move |p: &dyn Parameters, x: &Tensor| layer(p, 1, x)? * &mask;
        pass.recomputed("layer.1", &h, forward)?.sqr()?.mean_all()
    });
    assert!(gradients.expect("a step").norm() > 0.0);
}

/// A hidden state of the microbatch before: it must be detached.
#[test]
fn a_tensor_of_the_microbatch_before_names_both_microbatches() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let mut step = model.begin_step(StepOptions::microbatches(2)).expect("a step");
    let mut state = input(0, 3, 4);
    let mut ends = Vec::new();
    for _ in 0..2 {
        let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
        let x = (input(0, 3, 4) + &state).expect("equal shapes");
        state = pass.unit("layer.0", &x, |p, x| layer(p, 0, x)).expect("a forward");
        let loss = pass.unit("layer.1", &state, |p, x| layer(p, 1, x)).expect("a forward");
        let loss = loss.sqr().and_then(|it| it.mean_all()).expect("a loss");
        ends.push(pass.backward(&loss, 1));
    }
    let error = ends.pop().expect("two").expect_err("it depends on microbatch 0");
    assert!(matches!(error, Error::Runtime(hsdp::Error::StalePass { .. })), "{error:?}");
    let message = error.to_string();
    assert!(message.contains("microbatch 0") && message.contains("microbatch 1"), "{message}");
}

/// A penalty that a block keeps aside, as a router of experts has: with `unit` it has gradients.
#[test]
fn a_tensor_that_leaves_a_recomputed_unit_beside_its_output_is_refused() {
    let run = |recomputed: bool, of_input: bool, detached: bool| {
        let mut model = sharded(alone(), layers(2, 4), mesh());
        step(&mut model, |pass| {
            let aside = Arc::new(Mutex::new(None));
            let kept = Arc::clone(&aside);
            let forward = move |p: &dyn Parameters, x: &Tensor| {
                let y = layer(p, 1, x)?;
                let penalty = if of_input { x.sqr()? } else { y.abs()? }.sum_all()?;
                let penalty = if detached { penalty.detach() } else { penalty };
                kept.lock().expect("no panic").get_or_insert(penalty);
                Ok(y)
            };
            let units: &dyn Units = pass;
            let x = units.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
            let y = match recomputed {
                true => units.recomputed("layer.1", &x, forward)?,
                false => units.unit("layer.1", &x, forward)?,
            };
            let penalty = aside.lock().expect("no panic").take().expect("it ran");
            y.sqr()?.mean_all()? + penalty
        })
        .map(|gradients| gradients.norm())
    };
    for of_input in [false, true] {
        let error = run(true, of_input, false).expect_err("its gradients would be lost");
        assert!(
            matches!(&error, Error::LostGradients(LostGradients::BesideOutput { .. })),
            "{error:?}"
        );
        let message = error.to_string();
        let start = "a tensor left recomputed unit layer.1 beside its output, and the loss depends";
        assert!(message.starts_with(start), "{message}");
        let [with, without] = [false, true].map(|it| run(true, of_input, it));
        assert!(with.is_err());
        let constant = run(false, of_input, true).expect("a step");
        assert_eq!(without.expect("a detached one counts in the loss alone"), constant);
    }
    assert!(run(false, false, false).expect("a step") > run(false, false, true).expect("a step"));
}

/// The second use of a unit knows no tensor of the first, though both have the unit's name.
#[test]
fn a_tensor_that_a_later_use_of_the_same_recomputed_unit_captures_is_refused() {
    let run = |of_input: bool, detached: bool| {
        let kept = |spec: ModelSpec, unit: &Unit| spec.unit(unit.clone().keep());
        let spec = layers(2, 4).units().iter().fold(ModelSpec::new(), kept);
        let mut model = sharded(alone(), spec, mesh());
        step(&mut model, |pass| {
            let units: &dyn Units = pass;
            let aside = Arc::new(Mutex::new(None));
            let kept = Arc::clone(&aside);
            let x = units.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
            let first = move |p: &dyn Parameters, x: &Tensor| {
                let left = if of_input { x.clone() } else { p.get("layer.1.weight")?.sum_all()? };
                let left = if detached { left.detach() } else { left };
                kept.lock().expect("no panic").get_or_insert(left);
                layer(p, 1, x)
            };
            let y = units.recomputed("layer.1", &x, first)?;
            let left = aside.lock().expect("no panic").take().expect("it ran");
            let second = move |p: &dyn Parameters, x: &Tensor| layer(p, 1, x)?.broadcast_add(&left);
            units.recomputed("layer.1", &y, second)?.sqr()?.mean_all()
        })
        .map(|gradients| gradients.norm())
    };
    for of_input in [false, true] {
        assert!(run(of_input, true).expect("a step") > 0.0);
        let error = run(of_input, false).expect_err("its gradients would be lost");
        assert!(
            matches!(&error, Error::LostGradients(LostGradients::BesideOutput { .. })),
            "{error:?}"
        );
        assert_eq!(
            error.to_string().split(':').next(),
            Some(
                "a tensor left recomputed unit layer.1 beside its output, and recomputed unit \
                 layer.1 depends on it"
            )
        );
    }
}

#[test]
fn a_backward_of_an_evaluation_says_that_there_is_none() {
    let mut model = sharded(alone(), layers(2, 4), mesh());
    let mut evaluation = model.evaluation().expect("an evaluation");
    let pass = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
    let x = candle_core::Var::from_tensor(&input(0, 3, 4)).expect("a variable");
    let loss = loss_of_layers(&pass, 2, &x).expect("a forward");
    let error = pass.backward(&loss, 1).expect_err("there is no backward").to_string();
    assert!(error.contains("a batch of an evaluation has no backward: finish it"), "{error}");
}
