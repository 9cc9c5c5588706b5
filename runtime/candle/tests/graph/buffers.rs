//! Units that read and write buffers, and that sum statistics over all ranks; batch norms of a
//! recorded model.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};
use candle_nn::{ModuleT as _, VarBuilder, linear};
use hsdp::{
    Mesh, ModelOptions, ModelSpec, Param, Precision, ShardedModel, StepOptions, Unit, World,
};
use hsdp_candle::{
    DeclarationError, Error, ForwardMode, LostGradients, Parameters, Pass, Plain, Recorded, Units,
    UnitsExt, record, var_builder,
};
use hsdp_sharding::{BufferRule, Role};
use parking_lot::Mutex;

use crate::common::{self, Named, input, layer, layer_unit, sharded, step, step_of, values};

/// A unit with a buffer, and one behind it.
fn spec() -> ModelSpec {
    let unit = Unit::new("seen")
        .param(Param::new("seen.weight", [4, 4]))
        .param(Param::new("seen.mean", [4]).buffer());
    ModelSpec::new().unit(unit).unit(layer_unit(0, 4))
}

fn before() -> Vec<f32> {
    values(&Param::new("seen.mean", [4]))
}

/// The buffer after a batch.
fn after(mean: &Tensor, x: &Tensor) -> Result<Tensor> {
    (mean * 0.75)?.add(&(x.mean(0)? * 0.25)?)
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().and_then(|it| it.to_vec1()).expect("f32")
}

/// The buffer after some batches, in plain candle.
fn after_all(batches: impl IntoIterator<Item = Tensor>) -> Vec<f32> {
    let mean = Tensor::new(before(), &candle_core::Device::Cpu).expect("a list");
    flat(&batches.into_iter().fold(mean, |mean, x| after(&mean, &x).expect("one shape")))
}

/// Values of the buffer that a unit has read.
type Seen = Arc<Mutex<Vec<Vec<f32>>>>;

/// The forward of the first unit: it reads its buffer, writes it, and reads it again.
fn follow(p: &dyn Parameters, x: &Tensor, seen: &Seen) -> Result<Tensor> {
    assert_eq!(p.mode()?, ForwardMode::Training);
    let mean = p.buffer("seen.mean")?;
    p.write_buffer("seen.mean", &after(&mean, x)?)?;
    let written = p.buffer("seen.mean")?;
    seen.lock().extend([flat(&mean), flat(&written)]);
    x.matmul(&p.get("seen.weight")?)?.broadcast_add(&written)?.tanh()
}

fn loss(units: &dyn Units, x: &Tensor, recomputed: bool, seen: &Seen) -> Result<Tensor> {
    let y = match recomputed {
        false => units.unit("seen", x, |p, x| follow(p, x, seen))?,
        true => {
            let seen = Arc::clone(seen);
            units.recomputed("seen", x, move |p, x| follow(p, x, &seen))?
        }
    };
    units.unit("layer.0", &y, |p, y| layer(p, 0, y))?.sqr()?.mean_all()
}

fn mesh() -> Mesh {
    Mesh::new(1, 2).expect("two shards")
}

fn alone() -> ShardedModel {
    sharded(World::single(), spec(), Mesh::new(1, 1).expect("one rank"))
}

fn buffer_of(model: &ShardedModel) -> Vec<f32> {
    model.full_parameters().expect("a gather")["seen.mean"].clone()
}

/// All ranks have the same batches, so they write the same values.
#[test]
fn later_microbatches_read_what_earlier_ones_wrote() {
    for recomputed in [false, true] {
        let results = common::results(2, |world| {
            let mut model = sharded(world, spec(), mesh());
            let seen = Seen::default();
            for number in 0..2 {
                let batch = |index| input(2 * number + index, 3, 4);
                let _ = step_of(&mut model, 2, |pass, index| {
                    loss(pass, &batch(index), recomputed, &seen)
                })
                .expect("a step");
                let want = after_all((0..2 * number + 2).map(|index| input(index, 3, 4)));
                assert_eq!(buffer_of(&model), want, "after step {number}");
            }
            seen.lock().clone()
        });
        for seen in results {
            let after = |count: usize| after_all((0..count).map(|index| input(index, 3, 4)));
            // The second run sees what the first saw, and not what the first wrote.
            let runs = if recomputed { 2 } else { 1 };
            let of_run = |batch: usize| vec![vec![after(batch), after(batch + 1)]; runs].concat();
            let want: Vec<_> = (0..4).flat_map(of_run).collect();
            assert_eq!(seen, want, "recomputed {recomputed}");
        }
    }
}

#[test]
fn plain_buffers_are_those_of_a_pass() {
    let all = spec();
    let tensors = all.params().map(|(_, it)| it).chain(all.buffers().map(|(_, it)| it));
    let named: Named = tensors.map(|it| (it.name.clone(), values(it))).collect();
    let plain = Plain::new(spec(), &named, Precision::default()).expect("values for all");
    let plain = plain.in_mode(ForwardMode::Training);
    let seen = Seen::default();
    for index in 0..2 {
        let of_plain = loss(&plain, &input(index, 3, 4), true, &seen).expect("a forward");
        assert!(of_plain.track_op());
    }
    let want = after_all((0..2).map(|index| input(index, 3, 4)));
    assert_eq!(flat(&plain.buffer("seen.mean").expect("a buffer")), want);
    let told = plain.buffer("seen.weight").expect_err("a parameter").to_string();
    assert!(told.starts_with("the model has no buffer seen.weight"), "{told}");
    let of_unit = |forward: fn(&dyn Parameters, &Tensor) -> Result<Tensor>| {
        let refused = plain.unit("seen", &input(0, 3, 4), forward).expect_err("it is refused");
        Error::from(refused)
    };
    let shape = of_unit(|p, x| p.write_buffer("seen.mean", x).map(|()| x.clone()));
    assert!(matches!(shape, Error::Declaration(DeclarationError::BufferShape { .. })), "{shape}");
    let unknown = of_unit(|p, x| p.write_buffer("seen.weight", x).map(|()| x.clone()));
    assert!(unknown.to_string().contains("the model has no buffer seen.weight"), "{unknown}");
    let plain = plain.in_mode(ForwardMode::Evaluation);
    let late = plain.unit("seen", &input(0, 3, 4), |p, x| {
        assert_eq!(p.mode()?, ForwardMode::Evaluation);
        p.write_buffer("seen.mean", &p.buffer("seen.mean")?).map(|()| x.clone())
    });
    let told = late.expect_err("an evaluation writes none").to_string();
    assert!(told.contains("buffer seen.mean is written in an evaluation"), "{told}");
}

/// A written value with a history keeps none.
#[test]
fn a_written_value_may_depend_on_parameters() {
    let mut model = alone();
    let gradients = step(&mut model, |pass| {
        let y = pass.unit("seen", &input(0, 3, 4), |p, x| {
            let y = x.matmul(&p.get("seen.weight")?)?;
            p.write_buffer("seen.mean", &y.mean(0)?)?;
            let read = p.buffer("seen.mean")?;
            assert!(!read.track_op(), "a buffer has no gradient");
            y.broadcast_sub(&read)
        })?;
        pass.unit("layer.0", &y, |p, y| layer(p, 0, y))?.sqr()?.mean_all()
    });
    assert!(gradients.expect("a step").norm() > 0.0);
    let weight = values(&Param::new("seen.weight", [4, 4]));
    let weight = Tensor::from_vec(weight, (4, 4), &candle_core::Device::Cpu).expect("4 x 4");
    let want = input(0, 3, 4).matmul(&weight).and_then(|y| y.mean(0)).expect("a mean");
    assert_eq!(buffer_of(&model), flat(&want));
}

#[test]
fn a_dropped_step_leaves_the_buffer() {
    let mut model = alone();
    let seen = Seen::default();
    for ends in [true, false] {
        let mut step = model.begin_step(StepOptions::microbatches(2)).expect("a step");
        let pass = Pass::new(step.microbatch().expect("the first")).expect("a pass");
        let loss = loss(&pass, &input(0, 3, 4), false, &seen).expect("a forward");
        pass.backward(&loss, 1).expect("a backward");
        match ends {
            true => step.abandon("its batch cannot be read"),
            false => drop(step),
        }
        assert_eq!(buffer_of(&model), before());
    }
    let _ = step(&mut model, |pass| loss(pass, &input(1, 3, 4), false, &seen)).expect("a step");
    assert_eq!(buffer_of(&model), after_all([input(1, 3, 4)]));
    let read_first: Vec<_> = seen.lock().iter().step_by(2).cloned().collect();
    assert_eq!(read_first, vec![before(); 3]);
}

#[test]
fn an_evaluation_reads_and_writes_not() {
    let mut model = alone();
    let mut evaluation = model.evaluation().expect("between steps");
    let pass = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
    for recomputed in [false, true] {
        let forward = |p: &dyn Parameters, x: &Tensor| {
            assert_eq!(p.mode()?, ForwardMode::Evaluation);
            let mean = p.buffer("seen.mean")?;
            assert_eq!(flat(&mean), before());
            p.write_buffer("seen.mean", &mean)?;
            Ok(x.clone())
        };
        let written = match recomputed {
            false => pass.unit("seen", &input(0, 3, 4), forward),
            true => pass.recomputed("seen", &input(0, 3, 4), forward),
        };
        let error = Error::from(written.expect_err("it writes"));
        assert!(matches!(error, Error::Runtime(hsdp::Error::Misuse { .. })), "{error:?}");
        let told = error.to_string();
        let expected = "an evaluation writes no buffer, and this one writes seen.mean";
        assert!(told.contains(expected), "{told}");
    }
}

#[test]
fn a_second_run_that_reads_other_buffers_is_refused() {
    let spec = || {
        let unit = Unit::new("seen")
            .param(Param::new("seen.weight", [4, 4]))
            .param(Param::new("seen.mean", [4]).buffer())
            .param(Param::new("seen.other", [4]).buffer());
        ModelSpec::new().unit(unit)
    };
    // In place of the first, or beside it.
    for [first, second] in [[&["seen.mean"][..], &["seen.other"]], [&[], &["seen.other"]]] {
        let mut model = sharded(World::single(), spec(), Mesh::new(1, 1).expect("one rank"));
        let again = AtomicBool::new(false);
        let forward = move |p: &dyn Parameters, x: &Tensor| {
            let names = if again.swap(true, Ordering::Relaxed) { second } else { first };
            names.iter().try_for_each(|name| p.buffer(name).map(drop))?;
            x.matmul(&p.get("seen.weight")?)
        };
        let failed = step(&mut model, |pass| {
            pass.recomputed("seen", &input(0, 3, 4), forward)?.sqr()?.mean_all()
        });
        let error = failed.expect_err("another buffer");
        assert!(
            matches!(&error, Error::LostGradients(LostGradients::NotRepeatable { unit, .. })
                if unit == "seen"),
            "{error:?}"
        );
        let expected = "its second run reads buffer seen.other where its first did not";
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn names_and_shapes_that_are_not_declared_are_refused() {
    let refused = |forward: fn(&dyn Parameters, &Tensor) -> Result<Tensor>, recomputed: bool| {
        let mut model = alone();
        let failed = step(&mut model, |pass| match recomputed {
            false => pass.unit("seen", &input(0, 3, 4), forward),
            true => pass.recomputed("seen", &input(0, 3, 4), forward),
        });
        let error = failed.expect_err("it is refused");
        assert_eq!(buffer_of(&model), before());
        error
    };
    for recomputed in [false, true] {
        let error = refused(|p, _| p.get("seen.mean"), recomputed);
        assert!(
            matches!(&error, Error::Declaration(DeclarationError::IsBuffer { unit, name })
                if unit == "seen" && name == "seen.mean"),
            "{error:?}"
        );
        assert_eq!(
            error.to_string(),
            "unit seen reads seen.mean as a parameter, and the model declares it as a buffer: read \
             it with `Parameters::buffer`"
        );
        // A parameter is no buffer.
        for forward in [
            |p: &dyn Parameters, _: &Tensor| p.buffer("seen.weight"),
            |p: &dyn Parameters, x: &Tensor| {
                p.write_buffer("seen.weight", x)?;
                Ok(x.clone())
            },
        ] {
            let error = refused(forward, recomputed);
            assert!(
                matches!(&error, Error::Declaration(DeclarationError::UnknownBuffer { unit, name })
                    if unit == "seen" && name == "seen.weight"),
                "{error:?}"
            );
            assert_eq!(
                error.to_string(),
                "unit seen uses buffer seen.weight, which the model does not have: declare it with \
                 `Unit::batch_norm`, or with `Param::buffer` or `Param::averaged_buffer`, not as a \
                 parameter"
            );
        }
        let error = refused(
            |p, x| {
                p.write_buffer("seen.mean", &x.narrow(0, 0, 1)?)?;
                Ok(x.clone())
            },
            recomputed,
        );
        assert!(
            matches!(&error, Error::Declaration(DeclarationError::BufferShape { buffer, written, declared })
                if buffer == "seen.mean" && *written == [1, 4] && *declared == [4]),
            "{error:?}"
        );
        assert_eq!(error.to_string(), "buffer seen.mean is written as [1, 4], and declared as [4]");
    }
}

/// candle's layer would change copies of them.
#[test]
fn a_builder_refuses_buffers_and_gives_frozen_statistics() {
    let x = input(0, 3, 4);
    let declared = ModelSpec::new().unit(Unit::new("norm").batch_norm("bn", 4));
    let mut model = sharded(World::single(), declared, Mesh::new(1, 1).expect("one rank"));
    let failed = step(&mut model, |pass| {
        pass.unit("norm", &x, |p, x| {
            let vb = var_builder(p).pp("bn");
            assert!(vb.contains_tensor("weight") && !vb.contains_tensor("running_mean"));
            candle_nn::batch_norm(4, 1e-5, vb)?.forward_t(x, true)
        })
    });
    let error = failed.expect_err("buffers");
    assert!(
        matches!(&error, Error::Declaration(DeclarationError::Buffers { names })
            if names == "bn.running_mean"),
        "{error:?}"
    );
    assert!(error.to_string().contains("`hsdp_models::nn::batch_norm`"), "{error}");

    let tensor = |name: &str| Param::new(format!("bn.{name}"), [4]);
    let frozen = ["running_mean", "running_var"].map(|name| tensor(name).frozen());
    let unit = ["weight", "bias"].map(tensor).into_iter().chain(frozen);
    let spec = ModelSpec::new().unit(unit.fold(Unit::new("norm"), Unit::param));
    let init = |param: &Param| values(param).iter().map(|it| it + 1.0).collect();
    let options = ModelOptions::on(Mesh::new(1, 1).expect("one rank"));
    let mut model = ShardedModel::new(World::single(), spec, options, init).expect("a model");
    let gradients = step(&mut model, |pass| {
        let y = pass.unit("norm", &x, |p, x| {
            candle_nn::batch_norm(4, 1e-5, var_builder(p).pp("bn"))?.forward_t(x, false)
        })?;
        y.sqr()?.mean_all()
    });
    assert!(gradients.expect("frozen statistics").norm() > 0.0);
}

/// Two blocks, and norms that the program adds.
fn recorded() -> Recorded {
    let load = |vb: VarBuilder<'_>| {
        linear(4, 6, vb.pp("h.0.mlp"))?;
        linear(6, 4, vb.pp("h.1.mlp")).map(drop)
    };
    let recorded = record(load).expect("a model");
    recorded.batch_norm("h.0.late", 6).batch_norm("h.0.early", 4).batch_norm("norm", 4)
}

fn statistics(unit: &Unit) -> Vec<(&str, usize)> {
    unit.statistics.iter().map(|it| (it.name.as_str(), it.channels)).collect()
}

#[test]
fn recorded_norms_belong_to_the_units_of_their_names() {
    let recorded = recorded();
    assert_eq!(recorded.params().len(), 4 + 3 * 4);
    let spec = recorded.spec(&["h.*", "root"]).expect("units");
    let names = |params: &[Param]| -> Vec<String> {
        params.iter().map(|param| param.name.clone()).collect()
    };
    let [first, second, root] = spec.units() else { panic!("three units: {spec:?}") };
    assert_eq!(
        names(&first.params),
        [
            "h.0.mlp.weight",
            "h.0.mlp.bias",
            "h.0.late.weight",
            "h.0.late.bias",
            "h.0.early.weight",
            "h.0.early.bias"
        ]
    );
    assert_eq!(
        names(&first.buffers),
        [
            "h.0.late.running_mean",
            "h.0.late.running_var",
            "h.0.early.running_mean",
            "h.0.early.running_var"
        ]
    );
    // In the order in which they were added, which is that of the forward.
    assert_eq!(statistics(first), [("h.0.late", 6), ("h.0.early", 4)]);
    assert_eq!((statistics(second), second.buffers.len()), (vec![], 0));
    assert_eq!(statistics(root), [("norm", 4)]);
    assert_eq!(names(&root.params), ["norm.weight", "norm.bias"]);
    let is_equal = |buffer: &Param| buffer.buffer == Some(BufferRule::Equal);
    assert!(spec.buffers().all(|(_, buffer)| is_equal(buffer)));

    let error = recorded.spec(&["h.*"]).expect_err("the last norm has no unit").to_string();
    let begin = "no pattern takes norm.weight, norm.bias, norm.running_mean, norm.running_var:";
    assert!(error.starts_with(begin), "{error}");
    let error = recorded.clone().batch_norm("norm", 4).spec(&["root"]).expect_err("added twice");
    assert!(error.to_string().contains("norm.weight"), "{error}");
}

#[test]
fn recorded_norms_begin_at_the_identity() {
    let recorded = recorded();
    let all = common::results(2, |world| {
        let spec = recorded.spec(&["h.*", "root"]).expect("units");
        let model = ShardedModel::new(world, spec, ModelOptions::on(mesh()), recorded.init(3));
        model.expect("a model").full_parameters().expect("a gather")
    });
    for values in all {
        for (name, channels) in [("h.0.late", 6), ("h.0.early", 4), ("norm", 4)] {
            let expected =
                [("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)];
            for (what, value) in expected {
                assert_eq!(
                    values[&format!("{name}.{what}")],
                    vec![value; channels],
                    "{name}.{what}"
                );
            }
        }
    }
}

#[test]
fn declarations_of_recorded_norms_can_be_changed() {
    let frozen = recorded().map(Param::frozen).spec(&["h.*", "root"]).expect("units");
    assert!(frozen.params().all(|(_, param)| param.role == Role::Frozen));
    assert_eq!(frozen.buffers().count(), 6);
    assert_eq!(statistics(&frozen.units()[0]), [("h.0.late", 6), ("h.0.early", 4)]);
    let averaged = recorded().map(|param| match param.buffer {
        Some(_) => param.averaged_buffer(),
        None => param,
    });
    let averaged = averaged.spec(&["h.*", "root"]).expect("units");
    let mut buffers = averaged.buffers();
    assert!(buffers.all(|(_, it)| it.buffer == Some(BufferRule::Averaged)));
    assert!(averaged.params().all(|(_, param)| param.role == Role::Trainable));
}

#[test]
fn a_record_of_candles_norm_names_the_way_out() {
    let load = |vb: VarBuilder<'_>| candle_nn::batch_norm(4, 1e-5, vb.pp("bn")).map(drop);
    let told = record(load).expect_err("buffers").to_string();
    for way in ["`hsdp_models::nn::batch_norm`", "`Recorded::batch_norm`", "`Unit::batch_norm`"] {
        assert!(told.contains(way), "{way} is not in {told}");
    }
}

/// A unit that declares statistics, and a layer behind it.
fn normed() -> ModelSpec {
    ModelSpec::new().unit(Unit::new("norm").batch_norm("bn", 4)).unit(layer_unit(0, 4))
}

/// A loss in whose statistics `count` values of a channel count.
fn loss_of_counted(units: &dyn Units, count: f64, recomputed: bool) -> Result<Tensor> {
    let forward = move |p: &dyn Parameters, x: &Tensor| {
        assert!(p.statistics("norm").is_none(), "no unit declares it");
        let statistics = p.statistics("bn").expect("it is declared");
        let sums = statistics.forward([vec![count], vec![0.5; 8]].concat())?;
        assert_eq!(sums.len(), 9);
        x.broadcast_mul(&p.get("bn.weight")?)?.broadcast_add(&p.get("bn.bias")?)
    };
    let x = input(0, 3, 4);
    let y = match recomputed {
        false => units.unit("norm", &x, forward)?,
        true => units.recomputed("norm", &x, forward)?,
    };
    units.unit("layer.0", &y, |p, y| layer(p, 0, y))?.sqr()?.mean_all()
}

/// How a microbatch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Backward { weight: u64 },
    Finish,
}

/// Runs a step of a microbatch in whose statistics `count` values of a channel count.
fn step_of_counted(
    model: &mut ShardedModel,
    count: f64,
    end: End,
    recomputed: bool,
) -> std::result::Result<(), Error> {
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let pass = Pass::new(step.microbatch()?)?;
    let loss = loss_of_counted(&pass, count, recomputed)?;
    match end {
        End::Backward { weight } => drop(pass.backward(&loss, weight)?),
        End::Finish => pass.finish()?,
    }
    step.finish().map(drop).map_err(Error::from)
}

#[test]
fn values_that_count_without_a_weight_are_refused() {
    for recomputed in [false, true] {
        let mut model = sharded(World::single(), normed(), Mesh::new(1, 1).expect("one rank"));
        for end in [End::Backward { weight: 0 }, End::Finish] {
            let error = step_of_counted(&mut model, 3.0, end, recomputed).expect_err("no weight");
            assert!(
                matches!(&error, Error::LostGradients(LostGradients::Unweighted { unit })
                    if unit == "norm"),
                "{end:?}: {error:?}"
            );
            let told = error.to_string();
            assert!(
                told.contains("statistics of unit norm") && told.contains("without_data"),
                "{told}"
            );
        }
        step_of_counted(&mut model, 3.0, End::Backward { weight: 2 }, recomputed).expect("a step");
    }
}

/// A rank whose batch has no items loses nothing.
#[test]
fn no_items_need_no_weight() {
    for recomputed in [false, true] {
        for end in [End::Backward { weight: 0 }, End::Finish] {
            let ended = common::results(2, |world| {
                let rank = world.rank().index();
                let mut model = sharded(world, normed(), mesh());
                let (count, end) = match rank {
                    1 => (0.0, end),
                    _ => (3.0, End::Backward { weight: 3 }),
                };
                step_of_counted(&mut model, count, end, recomputed)
            });
            for ended in ended {
                ended.unwrap_or_else(|error| panic!("{end:?}: {error}"));
            }
        }
    }
}

#[test]
fn other_ranks_are_told_who_counted_without_a_weight() {
    for end in [End::Backward { weight: 0 }, End::Finish] {
        let told = common::results(2, |world| {
            let rank = world.rank().index();
            let mut model = sharded(world, normed(), mesh());
            let end = if rank == 1 { end } else { End::Backward { weight: 3 } };
            let error = step_of_counted(&mut model, 3.0, end, false).expect_err("no weight");
            error.to_string()
        });
        assert!(told[0].contains("rank 1") && told[0].contains("unit norm"), "{}", told[0]);
        assert!(told[1].contains("this microbatch has the weight 0"), "{}", told[1]);
    }
}

/// A microbatch that runs nothing has no weight, and an evaluation never has one.
#[test]
fn a_pass_that_counts_nothing_may_finish() {
    let mut model = sharded(World::single(), normed(), Mesh::new(1, 1).expect("one rank"));
    let mut step = model.begin_step(StepOptions::microbatches(2)).expect("a step");
    Pass::new(step.microbatch().expect("the first")).and_then(Pass::finish).expect("no forward");
    let pass = Pass::new(step.microbatch().expect("the second")).expect("a pass");
    let loss = loss_of_counted(&pass, 3.0, false).expect("a forward");
    pass.backward(&loss, 1).expect("a backward");
    let _ = step.finish().expect("a step");
}

#[test]
fn a_backward_of_statistics_in_a_forward_is_refused() {
    for recomputed in [false, true] {
        let mut model = sharded(World::single(), normed(), Mesh::new(1, 1).expect("one rank"));
        let forward = |p: &dyn Parameters, x: &Tensor| {
            let statistics = p.statistics("bn").expect("it is declared");
            statistics.backward(vec![0.0; 8])?;
            Ok(x.clone())
        };
        let failed = step(&mut model, |pass| match recomputed {
            false => pass.unit("norm", &input(0, 3, 4), forward),
            true => pass.recomputed("norm", &input(0, 3, 4), forward),
        });
        let error = failed.expect_err("it is a forward");
        assert!(
            matches!(&error, Error::LostGradients(LostGradients::TensorBackward { unit })
                if unit == "norm"),
            "{error:?}"
        );
    }
}
