//! Layers without a backward are named, and the failure of one rank reaches the others.

use std::sync::Arc;

use candle_core::{D, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_nn::ops::{layer_norm, rms_norm, softmax_last_dim};
use hsdp::dist::{OnBoth, OnShard, Partial, Sum, Varying};
use hsdp::{
    AdamW, AdamWOptions, Error as RuntimeError, GradientError, Mesh, ModelOptions, ModelSpec,
    Optimizer as _, Param, ShardedModel, StepOptions, Unused, World,
};
use hsdp_candle::distributed::{Dist, Tape};
use hsdp_candle::{Error, Parameters, Pass, UnitsExt};

use crate::common::{
    self, input, layer, layer_unit, layers, loss_of_layers, sharded, sharded_with, step, values,
};

fn mesh() -> Mesh {
    Mesh::new(1, 2).expect("two shards")
}

type Forward = Arc<dyn Fn(&dyn Parameters, &Tensor) -> candle_core::Result<Tensor> + Send + Sync>;

/// Runs a unit of a pass, or runs it again in the backward, too.
fn run(
    pass: &Pass<'_>,
    recomputed: bool,
    name: &str,
    x: &Tensor,
    forward: Forward,
) -> candle_core::Result<Tensor> {
    match recomputed {
        true => pass.recomputed(name, x, move |p, x| forward(p, x)),
        false => pass.unit(name, x, |p, x| forward(p, x)),
    }
}

/// Returns the parameters that an error names: those without a gradient on both ranks.
fn without_gradient(error: &Error) -> Vec<String> {
    match error {
        Error::Runtime(RuntimeError::Gradients(GradientError::WithoutGradient {
            parameters,
            ..
        })) => parameters.clone(),
        Error::Runtime(RuntimeError::Gradients(GradientError::UnusedParameters {
            parameters,
            ..
        })) => {
            assert!(parameters.iter().all(|(_, ranks)| *ranks == [0, 1]), "{error}");
            parameters.iter().map(|(name, _)| name.clone()).collect()
        }
        other => panic!("{other}"),
    }
}

/// Checks that three updates with weight decay change the second of two layers, and the first not.
/// Weight decay changes parameters whose gradients are zeros, and none without a gradient.
fn assert_first_layer_stays(
    forward: impl Fn(&Pass<'_>, &Tape) -> candle_core::Result<Tensor> + Sync,
) {
    for unused in [Unused::Warn, Unused::Zeros] {
        common::results(2, |world| {
            let options = ModelOptions { unused, ..ModelOptions::on(mesh()) };
            let mut model = sharded_with(world.clone(), layers(2, 4), options);
            let decay = AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() };
            let mut adamw = AdamW::new(&model, decay);
            let before = model.full_parameters().expect("a gather");
            for _ in 0..3 {
                let tape = Tape::of_mesh(&world, mesh()).expect("the mesh of the world");
                let gradients = step(&mut model, |pass| forward(pass, &tape));
                adamw.step(&mut model, gradients.expect("it passes")).expect("an update");
            }
            let after = model.full_parameters().expect("a gather");
            assert_eq!(before["layer.0.weight"], after["layer.0.weight"], "{unused:?}");
            assert_ne!(before["layer.1.weight"], after["layer.1.weight"], "{unused:?}");
        });
    }
}

/// A softmax of candle_nn after the second layer: the first two get no gradient, and the loss still
/// falls.
#[test]
fn parameters_before_a_layer_without_a_backward_are_named_with_the_cause() {
    for unused in [Unused::default(), Unused::ErrorOnAnyRank] {
        let ends = common::results(2, |world| {
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

/// candle gets zeros for an input that a unit cuts off. They do not count as gradients of the units
/// before it, which run as `unit` or as `recomputed`.
#[test]
fn parameters_before_a_cut_at_the_begin_of_a_unit_are_named() {
    let strict = Unused::ErrorOnAnyRank;
    let first = Unused::default();
    for (recomputed, unused) in [(false, first), (false, strict), (true, first), (true, strict)] {
        let ends = common::results(2, |world| {
            let options = ModelOptions { unused, ..ModelOptions::on(mesh()) };
            let mut model = sharded_with(world, layers(4, 4), options);
            step(&mut model, |pass| {
                let mut x = input(0, 3, 4);
                for index in 0..4 {
                    let forward = move |p: &dyn Parameters, x: &Tensor| match index {
                        2 => layer(p, index, &softmax_last_dim(x)?),
                        _ => layer(p, index, x),
                    };
                    x = run(pass, recomputed, &format!("layer.{index}"), &x, Arc::new(forward))?;
                }
                x.sqr()?.mean_all()
            })
            .map(drop)
        });
        for end in ends {
            let named = without_gradient(&end.expect_err("gradients are missing"));
            let names = ["layer.0.weight", "layer.0.bias", "layer.1.weight", "layer.1.bias"];
            assert_eq!(named, names, "{recomputed} {unused:?}");
        }
    }
}

/// The parameter is one tensor, which has the input of its first use as a parent.
#[test]
fn a_tower_behind_a_detached_output_is_named_whichever_tower_is_first() {
    for lost in ["layer.0", "layer.2"] {
        let ends = common::results(2, |world| {
            let spec = ModelSpec::new()
                .unit(layer_unit(0, 4))
                .unit(layer_unit(1, 4).keep())
                .unit(layer_unit(2, 4));
            let mut model = sharded_with(world, spec, ModelOptions::on(mesh()));
            step(&mut model, |pass| {
                let tower = |index: usize| {
                    let name = format!("layer.{index}");
                    let x = pass.unit(&name, &input(0, 3, 4), |p, x| layer(p, index, x))?;
                    let x = pass.unit("layer.1", &x, |p, x| layer(p, 1, x))?;
                    if name == lost { Ok(x.detach()) } else { Ok::<_, Error>(x) }
                };
                let [one, other] = [tower(0)?, tower(2)?];
                (one - other)?.affine(1.0, 1.0)?.sqr()?.mean_all()
            })
            .map(drop)
        });
        for end in ends {
            let end = end.expect_err("a tower has no gradient");
            let named = without_gradient(&end);
            let is_lost = |it: &GradientError| matches!(it, GradientError::WithoutGradient { .. });
            assert!(matches!(&end, Error::Runtime(RuntimeError::Gradients(it)) if is_lost(it)));
            assert_eq!(named, [format!("{lost}.weight"), format!("{lost}.bias")]);
        }
    }
}

#[test]
fn parameters_before_a_cut_are_not_updated_in_later_steps_either() {
    assert_first_layer_stays(|pass, _| {
        let x = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        let cut = |p: &dyn Parameters, x: &Tensor| layer(p, 1, &softmax_last_dim(x)?);
        pass.unit("layer.1", &x, cut)?.sqr()?.mean_all()
    });
}

/// A head that detaches its input trains itself alone. Zeros are gradients where the loss reaches a
/// unit by another way: those of a matrix whose product with a matrix of zeros is added, say.
#[test]
fn gradients_of_zeros_beside_a_detached_input_are_gradients() {
    for recomputed in [false, true] {
        let ends = common::results(2, |world| {
            let mut model = sharded_with(world, layers(3, 4), ModelOptions::on(mesh()));
            step(&mut model, |pass| {
                let run = |name: &str, x: &Tensor, forward| run(pass, recomputed, name, x, forward);
                // The gradient of the weight is 0: its factor is.
                let nothing = Arc::new(|p: &dyn Parameters, x: &Tensor| {
                    let by = (x.zeros_like()?.matmul(&p.get("layer.0.weight")?))?;
                    (x + by)?.broadcast_add(&p.get("layer.0.bias")?)
                });
                let x = run("layer.0", &input(0, 3, 4), nothing)?;
                let main = run("layer.1", &x, Arc::new(|p, x| layer(p, 1, x)))?;
                let aside = run("layer.2", &x, Arc::new(|p, x| layer(p, 2, &x.detach())))?;
                main.sqr()?.mean_all()? + aside.sqr()?.mean_all()?
            })
            .map(drop)
        });
        ends.into_iter().for_each(|end| end.expect("all have gradients"));
    }
}

/// A model of three layers. The last begins with a weight of zeros: the gradients of the
/// first two are zeros in step 0.
fn with_a_head_of_zeros(world: World, unused: Unused) -> ShardedModel {
    let options = ModelOptions { unused, ..ModelOptions::on(mesh()) };
    let init = |param: &Param| match &*param.name {
        "layer.2.weight" => vec![0.0; param.numel()],
        _ => values(param),
    };
    ShardedModel::new(world, layers(3, 4), options, init).expect("a model that can be planned")
}

/// The way around the unit that cuts the graph goes through no op of its own.
#[test]
fn a_head_that_begins_with_zeros_hides_no_way_around_a_cut() {
    for (recomputed, unused) in [false, true]
        .into_iter()
        .flat_map(|it| [(it, Unused::default()), (it, Unused::ErrorOnAnyRank)])
    {
        let ends = common::results(2, |world| {
            let mut model = with_a_head_of_zeros(world, unused);
            step(&mut model, |pass| {
                let run = |name: &str, x: &Tensor, forward| run(pass, recomputed, name, x, forward);
                let x = run("layer.0", &input(0, 3, 4), Arc::new(|p, x| layer(p, 0, x)))?;
                let cut = run("layer.1", &x, Arc::new(|p, x| layer(p, 1, &softmax_last_dim(x)?)))?;
                run("layer.2", &(x + cut)?, Arc::new(|p, x| layer(p, 2, x)))?.sqr()?.mean_all()
            })
            .map(drop)
        });
        ends.into_iter().for_each(|end| end.expect("the loss depends on all parameters"));
    }
}

/// All ranks' rows of a tensor.
fn gathered(tape: &Tape, rows: Tensor) -> candle_core::Result<Tensor> {
    let rows: Dist<Varying, Varying> = tape.assume(rows);
    Ok(rows.all_gather(OnShard).map_err(candle_core::Error::from)?.into_tensor())
}

/// The sum of all ranks' losses.
fn total(tape: &Tape, loss: Tensor) -> candle_core::Result<Tensor> {
    let loss: Dist<Partial, Partial> = tape.assume(loss);
    Ok(loss.all_reduce(OnBoth, Sum).map_err(candle_core::Error::from)?.into_tensor())
}

/// The collectives take part in the backward, with zeros, since a later one does. The second one
/// depends on the first.
#[test]
fn parameters_before_a_collective_that_the_loss_does_not_need_are_named() {
    for (recomputed, unused) in [false, true]
        .into_iter()
        .flat_map(|it| [(it, Unused::default()), (it, Unused::ErrorOnAnyRank)])
    {
        let ends = common::results(2, |world| {
            let rank = world.rank().index();
            let tape = Tape::of_mesh(&world, mesh()).expect("the mesh of the world");
            let options = ModelOptions { unused, ..ModelOptions::on(mesh()) };
            let mut model = sharded_with(world, layers(3, 4), options);
            step(&mut model, |pass| {
                let run = |index: usize, x: &Tensor| {
                    let name = format!("layer.{index}");
                    let forward = move |p: &dyn Parameters, x: &Tensor| layer(p, index, x);
                    run(pass, recomputed, &name, x, Arc::new(forward))
                };
                let x = run(0, &input(rank, 3, 4))?;
                let all = gathered(&tape, run(1, &x)?)?;
                let _ = gathered(&tape, all.sqr()?)?;
                total(&tape, run(2, &x)?.sqr()?.mean_all()?)
            })
            .map(drop)
        });
        for end in ends {
            let named = without_gradient(&end.expect_err("a layer has no gradient"));
            assert_eq!(named, ["layer.1.weight", "layer.1.bias"], "{recomputed} {unused:?}");
        }
    }
}

#[test]
fn parameters_before_such_a_collective_are_not_updated_in_later_steps_either() {
    assert_first_layer_stays(|pass, tape| {
        let aside = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        let _ = gathered(tape, aside)?;
        let main = pass.unit("layer.1", &input(0, 3, 4), |p, x| layer(p, 1, x))?;
        total(tape, main.sqr()?.mean_all()?)
    });
}

/// Units before it, whose gradients are zeros, lead to the loss by another way.
#[test]
fn a_head_that_begins_with_zeros_hides_no_way_around_a_collective() {
    let ends = common::results(2, |world| {
        let rank = world.rank().index();
        let tape = Tape::of_mesh(&world, mesh()).expect("the mesh of the world");
        let mut model = with_a_head_of_zeros(world, Unused::ErrorOnAnyRank);
        step(&mut model, |pass| {
            let x = pass.unit("layer.0", &input(rank, 3, 4), |p, x| layer(p, 0, x))?;
            let x = pass.unit("layer.1", &x, |p, x| layer(p, 1, x))?;
            let _ = gathered(&tape, x.clone())?;
            let head = pass.unit("layer.2", &x, |p, x| layer(p, 2, x))?;
            total(&tape, gathered(&tape, head)?.sqr()?.mean_all()?)
        })
        .map(drop)
    });
    ends.into_iter().for_each(|end| end.expect("the loss depends on all parameters"));
}

/// Only rank 0 uses the gathered rows; the gradient of rank 1's rows comes from there.
#[test]
fn a_gradient_that_another_rank_contributes_is_a_gradient() {
    let ends = common::results(2, |world| {
        let rank = world.rank().index();
        let tape = Tape::of_mesh(&world, mesh()).expect("the mesh of the world");
        let options = ModelOptions { unused: Unused::ErrorOnAnyRank, ..ModelOptions::on(mesh()) };
        let mut model = sharded_with(world, layers(2, 4), options);
        step(&mut model, |pass| {
            let x = pass.unit("layer.0", &input(rank, 3, 4), |p, x| layer(p, 0, x))?;
            let all = gathered(&tape, x)?;
            let own = pass.unit("layer.1", &input(rank, 6, 4), |p, x| layer(p, 1, x))?;
            let own = if rank == 0 { (own * all)? } else { own };
            total(&tape, own.sqr()?.mean_all()?)
        })
        .map(drop)
    });
    ends.into_iter().for_each(|end| end.expect("all have gradients on both ranks"));
}

/// The operations that the message names are those that cut gradients.
#[test]
fn the_named_operations_have_no_backward() {
    let x = candle_core::Var::from_tensor(&input(0, 2, 4)).expect("a variable");
    let ones = Tensor::ones(4, candle_core::DType::F32, x.device()).expect("ones");
    let table = Tensor::ones((2, 2), x.dtype(), x.device()).expect("ones");
    let rows = (1, 1, 2, 4);
    let wide = x.reshape(rows).expect("four dims");
    let thd = x.reshape((1, 2, 1, 4)).expect("four dims");
    let cut = [
        softmax_last_dim(&x),
        rms_norm(&x, &ones, 1e-5),
        layer_norm(&x, &ones, &ones, 1e-5),
        candle_nn::rotary_emb::rope(&wide, &table, &table),
        candle_nn::rotary_emb::rope_i(&wide, &table, &table),
        candle_nn::rotary_emb::rope_thd(&thd, &table, &table),
        flash_attn::<f32>(&thd, &thd, &thd, 1.0, AttnMask::None, None, None),
        x.arg_sort_last_dim(true),
        Ok(x.detach()),
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
    let ends = common::results(2, |world| {
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
    let ends = common::results(2, |world| {
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
    let ends = common::results(2, |world| {
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
