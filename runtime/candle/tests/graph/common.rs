//! A small model to test on, and its unsharded twin.

#![allow(dead_code, reason = "every test crate uses its own part of this")]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use hsdp::{
    Event, Gradients, Mesh, ModelOptions, ModelSpec, Param, Precision, RankFailure, ShardedModel,
    StepOptions, Unit, World, WorldOptions,
};
use hsdp_candle::{Error, Parameters, Pass, Plain, UnitInputs, Units, UnitsExt};

/// Runs `size` ranks as threads, and returns their results in rank order. An error is a result like
/// any other: it does not end the world. Panics if a rank does.
pub(crate) fn results<T: Send>(size: usize, rank: impl Fn(World) -> T + Sync) -> Vec<T> {
    let rank = |world| Ok::<_, RankFailure>(rank(world));
    let ends = hsdp::launch(size, WorldOptions::default(), rank);
    ends.into_iter().map(|end| end.expect("no rank panics")).collect()
}

/// Gradients by name.
pub(crate) type Named = BTreeMap<String, Vec<f32>>;

/// Values that differ from parameter to parameter, of all sizes between -0.5 and 0.5.
pub(crate) fn values(param: &Param) -> Vec<f32> {
    let start = param.name.bytes().fold(7_usize, |hash, byte| hash * 31 % 1009 + usize::from(byte));
    (0..param.numel()).map(|i| ((start + i * 37) % 101) as f32 / 101.0 - 0.5).collect()
}

/// `[rows, width]`, different on each rank.
pub(crate) fn input(rank: usize, rows: usize, width: usize) -> Tensor {
    let values: Vec<f32> =
        (0..rows * width).map(|i| ((rank * 13 + i * 29) % 53) as f32 / 53.0 - 0.5).collect();
    Tensor::from_vec(values, (rows, width), &Device::Cpu).expect("as many values as elements")
}

/// `count` units `layer.0`, ... with a square `weight` and a `bias`.
pub(crate) fn layers(count: usize, width: usize) -> ModelSpec {
    (0..count).fold(ModelSpec::new(), |spec, layer| spec.unit(layer_unit(layer, width)))
}

pub(crate) fn layer_unit(layer: usize, width: usize) -> Unit {
    Unit::new(format!("layer.{layer}"))
        .param(Param::new(format!("layer.{layer}.weight"), [width, width]))
        .param(Param::new(format!("layer.{layer}.bias"), [width]))
}

/// `tanh(x W^T + b)` of one unit.
pub(crate) fn layer(p: &dyn Parameters, layer: usize, x: &Tensor) -> CandleResult<Tensor> {
    let weight = p.get(&format!("layer.{layer}.weight"))?;
    let bias = p.get(&format!("layer.{layer}.bias"))?;
    x.matmul(&weight.t()?)?.broadcast_add(&bias)?.tanh()
}

/// All layers, one after the other, and the mean of the squares.
pub(crate) fn loss_of_layers(units: &dyn Units, count: usize, x: &Tensor) -> CandleResult<Tensor> {
    let mut x = x.clone();
    for index in 0..count {
        x = units.unit(&format!("layer.{index}"), &x, |p, x| layer(p, index, x))?;
    }
    x.sqr()?.mean_all()
}

/// A rank's part of a model whose parameters are [`values`].
pub(crate) fn sharded(world: World, spec: ModelSpec, mesh: Mesh) -> ShardedModel {
    sharded_with(world, spec, ModelOptions::on(mesh))
}

pub(crate) fn sharded_with(world: World, spec: ModelSpec, options: ModelOptions) -> ShardedModel {
    ShardedModel::new(world, spec, options, values).expect("a model that can be planned")
}

/// Runs the units of a model, all of them with a second run in the backward, or none.
#[derive(Clone, Copy)]
pub(crate) struct Runner<'a> {
    pub(crate) units: &'a dyn Units,
    pub(crate) recomputed: bool,
}

impl Runner<'_> {
    pub(crate) fn run<I: UnitInputs>(
        self,
        name: &str,
        inputs: I,
        forward: impl Fn(&dyn Parameters, I::Lent<'_>) -> CandleResult<Tensor> + Send + Sync + 'static,
    ) -> CandleResult<Tensor> {
        match self.recomputed {
            true => self.units.recomputed(name, inputs, forward),
            false => self.units.unit(name, inputs, forward),
        }
    }

    pub(crate) fn layer(self, index: usize, x: &Tensor) -> CandleResult<Tensor> {
        self.run(&format!("layer.{index}"), x, move |p, x| layer(p, index, x))
    }
}

/// One step of one microbatch of weight 1, with `loss` for a model.
pub(crate) fn step(
    model: &mut ShardedModel,
    loss: impl FnOnce(&Pass<'_>) -> CandleResult<Tensor>,
) -> Result<Gradients, Error> {
    let mut loss = Some(loss);
    step_of(model, 1, |pass, _| loss.take().expect("one microbatch")(pass))
}

/// One step of microbatches of weight 1, with `loss` of each for a model.
pub(crate) fn step_of(
    model: &mut ShardedModel,
    microbatches: usize,
    mut loss: impl FnMut(&Pass<'_>, usize) -> CandleResult<Tensor>,
) -> Result<Gradients, Error> {
    let mut step = model.begin_step(StepOptions::microbatches(microbatches))?;
    for microbatch in 0..microbatches {
        let pass = Pass::new(step.microbatch()?)?;
        pass.backward(&loss(&pass, microbatch)?, 1)?;
    }
    Ok(step.finish()?)
}

/// The gradients of a loss on whole parameters in plain candle, in f32. A parameter without a
/// gradient has no entry.
pub(crate) fn plain_gradients(
    spec: &ModelSpec,
    loss: impl FnOnce(&Plain) -> CandleResult<Tensor>,
) -> Named {
    plain_gradients_in(Precision::default(), spec, loss)
}

/// Computes [`plain_gradients`] in another precision.
pub(crate) fn plain_gradients_in(
    precision: Precision,
    spec: &ModelSpec,
    loss: impl FnOnce(&Plain) -> CandleResult<Tensor>,
) -> Named {
    let all = spec.params().map(|(_, param)| (param.name.clone(), values(param))).collect();
    let plain = Plain::new(spec.clone(), &all, precision).expect("values for all");
    let gradients = loss(&plain).and_then(|loss| loss.backward()).expect("plain candle");
    let in_f32 = |gradient: &Tensor| gradient.flatten_all()?.to_dtype(DType::F32)?.to_vec1();
    let gradient_of = |(name, var): (&String, &candle_core::Var)| {
        Some((name.clone(), in_f32(gradients.get(var)?).expect("a float gradient")))
    };
    plain.parameters().iter().filter_map(gradient_of).collect()
}

/// The events of a step as words: `gather 0 forward`, `reduce 1`, ...
pub(crate) fn words(events: &[Event]) -> Vec<String> {
    let word = |event: &Event| match event {
        Event::Gather { unit, phase, .. } => {
            Some(format!("gather {unit} {phase:?}").to_lowercase())
        }
        Event::ReduceScatter { unit, .. } => Some(format!("reduce {unit}")),
        _ => None,
    };
    events.iter().filter_map(word).collect()
}

/// The gradients of all ranks, added up in the mesh's order and divided once.
pub(crate) fn mean(mesh: Mesh, parts: &[Named]) -> Named {
    let rows = parts.chunks(mesh.shard_size()).map(|row| sum(row.iter().cloned()));
    divided(&sum(rows), mesh.world_size() as f64)
}

/// The sum of `parts`, added in f32 and in this order.
pub(crate) fn sum(mut parts: impl Iterator<Item = Named>) -> Named {
    let first = parts.next().expect("something to add up");
    parts.fold(first, |mut total, part| {
        for (name, total) in &mut total {
            total.iter_mut().zip(&part[name]).for_each(|(total, part)| *total += part);
        }
        total
    })
}

/// `total` divided by `by`, with one rounding.
#[expect(clippy::cast_possible_truncation, reason = "the one rounding of a division")]
pub(crate) fn divided(total: &Named, by: f64) -> Named {
    let divide = |values: &Vec<f32>| values.iter().map(|v| (f64::from(*v) / by) as f32).collect();
    total.iter().map(|(name, values)| (name.clone(), divide(values))).collect()
}

/// Asserts that two sets of gradients are the same, bit by bit.
#[track_caller]
pub(crate) fn assert_same_bits(got: &Named, want: &Named) {
    let bits = |values: &Named| -> BTreeMap<String, Vec<u32>> {
        values
            .iter()
            .map(|(name, values)| (name.clone(), values.iter().map(|v| v.to_bits()).collect()))
            .collect()
    };
    assert_eq!(bits(got), bits(want), "\n got {got:?}\nwant {want:?}");
}
