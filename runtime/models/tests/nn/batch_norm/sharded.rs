//! Nets with batch norms on meshes: losses, parameters and running statistics are those of one rank
//! that has the whole batch, in plain candle.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use hsdp::{
    DType as HsdpDType, Mesh, ModelOptions, Objective, Optimizer as _, Precision, Sgd, SgdOptions,
    ShardedModel, StepOptions, Uneven, World,
};
use hsdp_candle::{
    Error, ForwardMode, LostGradients, Parameters, Pass, Plain, UnitInputs, Units, UnitsExt,
};
use hsdp_models::nn::{self, BatchNormOptions, composed};
use hsdp_sharding::{ModelSpec, Param, Role, Unit};

use crate::common::{self, Named, results};
use crate::layers::{flat, noise};

const MESHES: [[usize; 2]; 4] = [[1, 1], [1, 2], [2, 2], [4, 1]];
const RATE: f64 = 0.1;

/// How a net runs its units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    Once,
    Recomputed,
}

/// Items with their targets.
struct Batch {
    x: Tensor,
    targets: Tensor,
    /// The rank that has each item.
    ranks: Vec<usize>,
}

/// A net: its units, the dims of an item, and the loss of each item, `[items]`.
#[derive(Clone, Copy)]
struct Net {
    spec: fn() -> ModelSpec,
    item: &'static [usize],
    losses: fn(&dyn Units, &Batch, Run) -> Result<Tensor>,
}

/// A training.
#[derive(Clone, Copy)]
struct Case {
    net: Net,
    mesh: [usize; 2],
    run: Run,
    /// The number of items, by microbatch and rank. A rank without any has no data.
    items: &'static [&'static [usize]],
    precision: Precision,
    objective: Objective,
    statistics: StatisticsOf,
    steps: usize,
}

/// The items that the statistics of a norm are those of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StatisticsOf {
    AllRanks,
    EachRank,
}

/// Results of a training.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f64>,
    /// Parameters and buffers.
    values: Named,
}

impl Case {
    fn of(net: Net, mesh: [usize; 2], run: Run) -> Self {
        const ITEMS: [&[&[usize]]; 4] = [&[&[8]], &[&[5, 5]], &[&[4, 4, 4]], &[&[4, 4, 4, 4]]];
        Self {
            net,
            mesh,
            run,
            items: ITEMS[mesh[0] * mesh[1] - 1],
            precision: Precision::default(),
            objective: Objective::WeightedMean,
            statistics: StatisticsOf::AllRanks,
            steps: 3,
        }
    }

    fn ranks(&self) -> usize {
        self.mesh[0] * self.mesh[1]
    }

    /// Returns the items of a rank in the batch of a microbatch.
    fn part(&self, microbatch: usize, rank: usize) -> Range<usize> {
        let items = self.items[microbatch];
        let begin = items[..rank].iter().sum();
        begin..begin + items[rank]
    }

    /// Returns the items at a range of the batch of a microbatch.
    fn batch(&self, step: usize, microbatch: usize, range: Range<usize>) -> Result<Batch> {
        let items = self.items[microbatch];
        let all: usize = items.iter().sum();
        let seed = 100 + 10 * step + microbatch;
        let dims = [&[all], self.net.item].concat();
        let of = |rank: usize| vec![rank; items[rank]];
        let ranks: Vec<usize> = (0..items.len()).flat_map(of).collect();
        Ok(Batch {
            x: noise(seed, &dims, DType::F32).narrow(0, range.start, range.len())?,
            targets: noise(seed + 5, &[all, 2], DType::F32).narrow(0, range.start, range.len())?,
            ranks: ranks[range].to_vec(),
        })
    }

    fn has_data(&self, rank: usize) -> bool {
        self.items.iter().any(|items| items[rank] > 0)
    }

    fn sharded(&self) -> Trained {
        let mut ranks = results(self.ranks(), |world| self.train_rank(world)).into_iter();
        let first = ranks.next().expect("a rank").expect("a training");
        for (index, other) in ranks.enumerate() {
            let other = other.expect("a training");
            assert!(other == first, "rank {} has other results than rank 0", index + 1);
        }
        first
    }

    fn train_rank(&self, world: World) -> std::result::Result<Trained, Error> {
        let rank = world.rank().index();
        let uneven = match (0..self.ranks()).all(|rank| self.has_data(rank)) {
            true => Uneven::Error,
            false => Uneven::ZeroWeight,
        };
        let Self { precision, objective, .. } = *self;
        let mesh = Mesh::new(self.mesh[0], self.mesh[1])?;
        let options = ModelOptions { precision, objective, uneven, ..ModelOptions::on(mesh) };
        let mut model = ShardedModel::new(world, (self.net.spec)(), options, initial)?;
        let mut sgd = Sgd::new(&model, SgdOptions { learning_rate: RATE, ..Default::default() });
        let mut losses = Vec::new();
        for number in 0..self.steps {
            let options = StepOptions::microbatches(self.items.len());
            let has_data = self.has_data(rank);
            let options = if has_data { options } else { options.without_data() };
            let mut step = model.begin_step(options)?;
            for microbatch in (0..self.items.len()).filter(|_| has_data) {
                let batch = self.batch(number, microbatch, self.part(microbatch, rank))?;
                let pass = Pass::new(step.microbatch()?)?;
                let losses = (self.net.losses)(&pass, &batch, self.run)?;
                // A mean over no items is NaN, and its backward is left out.
                match batch.ranks.len() as u64 {
                    0 if number % 2 == 0 => pass.backward_sum(&losses.sum_all()?, 0)?,
                    items => pass.backward(&losses.mean_all()?, items)?,
                };
            }
            let gradients = step.finish()?;
            losses.push(gradients.loss());
            sgd.step(&mut model, gradients)?;
        }
        Ok(Trained { losses, values: model.full_parameters()? })
    }

    /// Trains in plain candle, on whole parameters.
    fn whole(&self) -> Trained {
        let spec = (self.net.spec)();
        let tensors = spec.params().map(|(_, it)| it).chain(spec.buffers().map(|(_, it)| it));
        let mut values: Named = tensors.map(|it| (it.name.clone(), initial(it))).collect();
        let mut losses = Vec::new();
        for step in 0..self.steps {
            let (loss, after) = self.whole_step(&spec, step, &values).expect("plain candle");
            losses.push(loss);
            values = after;
        }
        Trained { losses, values }
    }

    /// Returns the loss of a step, and parameters and buffers after it.
    fn whole_step(&self, spec: &ModelSpec, step: usize, values: &Named) -> Result<(f64, Named)> {
        let with_data: Vec<usize> = (0..self.ranks()).filter(|rank| self.has_data(*rank)).collect();
        // The ranks of each batch that is normalized by its own statistics.
        let groups: Vec<Vec<usize>> = match self.statistics {
            StatisticsOf::AllRanks => vec![with_data],
            StatisticsOf::EachRank => with_data.into_iter().map(|rank| vec![rank]).collect(),
        };
        let items: usize = self.items.iter().copied().flatten().sum();
        let (mut loss, mut after) = (0.0, values.clone());
        let mut buffers: Vec<Named> = Vec::new();
        for ranks in groups {
            let plain = Plain::new(spec.clone(), values, self.precision)?;
            let plain = plain.in_mode(ForwardMode::Training);
            let mut sums = Vec::new();
            for microbatch in 0..self.items.len() {
                let [first, last] =
                    [ranks[0], ranks[ranks.len() - 1]].map(|rank| self.part(microbatch, rank));
                let batch = self.batch(step, microbatch, first.start..last.end)?;
                let losses = (self.net.losses)(&plain, &batch, Run::Once)?;
                for rank in &ranks {
                    let part = self.part(microbatch, *rank);
                    let part = losses
                        .narrow(0, part.start - first.start, part.len())?
                        .to_dtype(DType::F64)?;
                    sums.push(match self.objective {
                        Objective::RankMean => (part.mean_all()? / self.ranks() as f64)?,
                        _ => (part.sum_all()? / items as f64)?,
                    });
                }
            }
            let sum = Tensor::stack(&sums, 0)?.sum_all()?;
            loss += sum.to_scalar::<f64>()?;
            let gradients = sum.backward()?;
            for (_, param) in spec.params().filter(|(_, param)| param.role == Role::Trainable) {
                let Some(gradient) = gradients.get(&plain.parameters()[&param.name]) else {
                    continue;
                };
                let moves = flat(&(gradient * RATE)?);
                let values = after.get_mut(&param.name).expect("a value");
                values.iter_mut().zip(moves).for_each(|(value, by)| *value -= by);
            }
            let buffer = |name: &String| Ok((name.clone(), flat(&plain.buffer(name)?)));
            let names = spec.buffers().map(|(_, buffer)| &buffer.name);
            buffers.push(names.map(buffer).collect::<Result<_>>()?);
        }
        let count = buffers.len() as f64;
        after.extend(common::divided(&common::sum(buffers.into_iter()), count));
        Ok((loss, after))
    }

    /// Asserts that a sharded training is the unsharded one.
    #[track_caller]
    fn check(&self, what: &str) {
        let what = format!("{what} on {:?}, {:?}", self.mesh, self.run);
        let (got, want) = (self.sharded(), self.whole());
        let near = |got: f64, want: f64| (got - want).abs() <= 1e-6 * want.abs().max(1.0);
        assert_eq!(got.losses.len(), want.losses.len());
        for (got, want) in got.losses.iter().zip(&want.losses) {
            assert!(near(*got, *want), "{what}: the loss {got} is not {want}");
        }
        assert_eq!(got.values.len(), want.values.len());
        for (name, got) in &got.values {
            let before = initial_of(&(self.net.spec)(), name);
            for (index, (got, want)) in got.iter().zip(&want.values[name]).enumerate() {
                let is_near = near(f64::from(*got), f64::from(*want));
                let before = before[index];
                assert!(is_near, "{what}: {name}[{index}] is {got}, not {want}, from {before}");
            }
        }
    }
}

fn initial(param: &Param) -> Vec<f32> {
    let values = common::values(param);
    match param.name.rsplit('.').next() {
        Some("running_var") => values.iter().map(|it| it + 1.0).collect(),
        _ if param.name.contains("norm") && param.name.ends_with("weight") => {
            values.iter().map(|it| it + 1.0).collect()
        }
        _ => values,
    }
}

fn initial_of(spec: &ModelSpec, name: &str) -> Vec<f32> {
    let all = spec.params().map(|(_, it)| it).chain(spec.buffers().map(|(_, it)| it));
    initial(all.into_iter().find(|it| it.name == name).expect("a tensor of the model"))
}

fn unit<I: UnitInputs>(
    units: &dyn Units,
    (name, run): (&str, Run),
    inputs: I,
    forward: impl Fn(&dyn Parameters, I::Lent<'_>) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    match run {
        Run::Once => units.unit(name, inputs, forward),
        Run::Recomputed => units.recomputed(name, inputs, forward),
    }
}

fn norm(p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
    nn::batch_norm(p, name, x, BatchNormOptions::default())
}

fn linear(p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
    nn::linear(x, &p.get(&format!("{name}.weight"))?, None)
}

/// Losses of the items: the mean of the squares of what the targets differ by.
fn squares(y: &Tensor, batch: &Batch) -> Result<Tensor> {
    y.to_dtype(DType::F32)?.sub(&batch.targets)?.sqr()?.mean(1)
}

/// A residual net over images: convolutions, norms, and a unit with two inputs.
const RESIDUAL: Net = Net {
    spec: || {
        let conv = |name: &str, inputs| Param::new(format!("{name}.weight"), [4, inputs, 3, 3]);
        let stem = Unit::new("stem").param(conv("stem", 2)).batch_norm("norm0", 4);
        let block = Unit::new("block")
            .param(conv("block.a", 4))
            .batch_norm("norm1", 4)
            .param(conv("block.b", 4))
            .batch_norm("norm2", 4);
        let join = Unit::new("join").param(Param::new("join.scale", [1, 4, 1, 1]));
        let head = Unit::new("head").param(Param::new("head.weight", [2, 4]));
        ModelSpec::new().unit(stem).unit(block).unit(join).unit(head)
    },
    item: &[2, 5, 4],
    losses: |units, batch, run| {
        fn conv(p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
            x.conv2d(&p.get(&format!("{name}.weight"))?, 1, 1, 1, 1)
        }
        let x = unit(units, ("stem", run), &batch.x, |p, x| {
            norm(p, "norm0", &conv(p, "stem", x)?)?.relu()
        })?;
        let y = unit(units, ("block", run), &x, |p, x| {
            let x = norm(p, "norm1", &conv(p, "block.a", x)?)?.relu()?;
            norm(p, "norm2", &conv(p, "block.b", &x)?)
        })?;
        let y = unit(units, ("join", run), [&y, &x], |p, [y, x]| {
            y.add(&x.broadcast_mul(&p.get("join.scale")?)?)?.relu()
        })?;
        let y = unit(units, ("head", run), &y, |p, y| linear(p, "head", &y.mean((2, 3))?))?;
        squares(&y, batch)
    },
};

/// The units of nets over rows: two layers with norms, one of them with two, and a head.
fn dense_units() -> [Unit; 3] {
    let weight = |name: &str, dims: [usize; 2]| Param::new(format!("{name}.weight"), dims);
    let first = Unit::new("first").param(weight("first", [6, 3])).batch_norm("norm0", 6);
    let second = Unit::new("second")
        .param(weight("second.a", [6, 6]))
        .batch_norm("norm1", 6)
        .param(weight("second.b", [6, 6]))
        .batch_norm("norm2", 6);
    [first, second, Unit::new("head").param(weight("head", [2, 6]))]
}

fn spec_of(units: impl IntoIterator<Item = Unit>) -> ModelSpec {
    units.into_iter().fold(ModelSpec::new(), ModelSpec::unit)
}

type Layer = fn(&dyn Parameters, &str, &Tensor) -> Result<Tensor>;

fn dense_losses(units: &dyn Units, batch: &Batch, run: Run, norm: Layer) -> Result<Tensor> {
    let x = unit(units, ("first", run), &batch.x, move |p, x| {
        norm(p, "norm0", &linear(p, "first", &x.to_dtype(p.dtype())?)?)?.tanh()
    })?;
    let x = unit(units, ("second", run), &x, move |p, x| {
        let y = norm(p, "norm1", &linear(p, "second.a", x)?)?.tanh()?;
        norm(p, "norm2", &linear(p, "second.b", &y)?)?.add(x)
    })?;
    let y = unit(units, ("head", run), &x, |p, x| linear(p, "head", x))?;
    squares(&y, batch)
}

/// A residual net over rows, which computes in any dtype.
const DENSE: Net = Net {
    spec: || spec_of(dense_units()),
    item: &[3],
    losses: |units, batch, run| dense_losses(units, batch, run, norm),
};

/// This net with the layer that a GPU runs.
const COMPOSED: Net = Net {
    losses: |units, batch, run| {
        dense_losses(units, batch, run, |p, name, x| {
            composed::batch_norm(p, name, x, BatchNormOptions::default())
        })
    },
    ..DENSE
};

/// This net with the tensors of its norms alone, and buffers that are averaged.
const OWN: Net = Net {
    spec: || {
        let own = |mut unit: Unit| {
            unit.statistics.clear();
            for buffer in &mut unit.buffers {
                *buffer = buffer.clone().averaged_buffer();
            }
            unit
        };
        spec_of(dense_units().map(own))
    },
    ..DENSE
};

/// This net with one frozen norm of two in a unit.
const FROZEN: Net = Net {
    spec: || {
        spec_of(dense_units().map(|mut unit| {
            for param in unit.params.iter_mut().filter(|it| it.name.starts_with("norm2")) {
                *param = param.clone().frozen();
            }
            unit
        }))
    },
    ..DENSE
};

/// A net with two norms beside each other in a unit, as in a block whose skip has a projection.
const BRANCHES: Net = Net {
    losses: |units, batch, run| {
        let x = unit(units, ("first", run), &batch.x, |p, x| {
            norm(p, "norm0", &linear(p, "first", x)?)?.tanh()
        })?;
        let x = unit(units, ("second", run), &x, |p, x| {
            let y = norm(p, "norm1", &linear(p, "second.a", x)?)?;
            y.add(&norm(p, "norm2", &linear(p, "second.b", x)?)?)?.tanh()
        })?;
        let y = unit(units, ("head", run), &x, |p, x| linear(p, "head", x))?;
        squares(&y, batch)
    },
    ..DENSE
};

#[test]
fn a_residual_net_trains_as_it_does_on_one_rank() {
    for mesh in MESHES {
        for run in [Run::Once, Run::Recomputed] {
            Case::of(RESIDUAL, mesh, run).check("a residual net");
        }
    }
}

/// A variance needs two values, which two ranks have together.
#[test]
fn ranks_may_have_one_item_each() {
    for run in [Run::Once, Run::Recomputed] {
        Case { items: &[&[1, 1, 1, 1]], ..Case::of(DENSE, [2, 2], run) }.check("one item each");
    }
}

#[test]
fn the_composed_layer_trains_alike() {
    for mesh in MESHES {
        for run in [Run::Once, Run::Recomputed] {
            Case::of(COMPOSED, mesh, run).check("composed layers");
        }
    }
}

#[test]
fn ranks_may_have_different_numbers_of_items() {
    for objective in [Objective::WeightedMean, Objective::RankMean] {
        for run in [Run::Once, Run::Recomputed] {
            for net in [DENSE, COMPOSED] {
                let case = Case { objective, ..Case::of(net, [2, 2], run) };
                Case { items: &[&[1, 5, 2, 9]], ..case }.check(&format!("{objective:?}"));
            }
        }
    }
}

#[test]
fn a_rank_may_be_without_data() {
    for run in [Run::Once, Run::Recomputed] {
        let check = |mesh, items| {
            Case { items, ..Case::of(DENSE, mesh, run) }.check("a rank without data");
        };
        check([2, 2], &[&[4, 0, 3, 2]]);
        check([1, 2], &[&[0, 5]]);
        check([4, 1], &[&[3, 3, 0, 0]]);
    }
}

/// candle leaves one of two branches out of the graph, if they have no elements.
#[test]
fn a_rank_may_have_a_microbatch_without_items() {
    const ITEMS: [&[&[usize]]; 2] = [&[&[0, 3], &[4, 2]], &[&[3, 2], &[4, 0]]];
    for run in [Run::Once, Run::Recomputed] {
        for net in [DENSE, COMPOSED, RESIDUAL, BRANCHES] {
            for items in ITEMS {
                Case { items, ..Case::of(net, [1, 2], run) }.check("no items");
            }
        }
    }
}

/// The statistics are those of one microbatch over all ranks, and the running statistics follow
/// each.
#[test]
fn each_microbatch_has_its_own_statistics() {
    let items: &[&[usize]] = &[&[3, 2, 4, 1], &[2, 2, 1, 5]];
    for run in [Run::Once, Run::Recomputed] {
        for net in [DENSE, COMPOSED] {
            Case { items, ..Case::of(net, [2, 2], run) }.check("two microbatches");
        }
        Case { items: &[&[3, 2], &[2, 2], &[1, 1]], ..Case::of(RESIDUAL, [1, 2], run) }
            .check("three microbatches");
        Case { items: &[&[5, 0], &[4, 0]], ..Case::of(DENSE, [2, 1], run) }
            .check("two microbatches of one rank");
    }
}

#[test]
fn a_norm_may_be_frozen() {
    for mesh in MESHES {
        for run in [Run::Once, Run::Recomputed] {
            Case::of(FROZEN, mesh, run).check("a frozen norm");
        }
    }
}

/// A unit that has nothing but a frozen norm, between trainable ones, and before them.
#[test]
fn a_unit_may_have_a_frozen_norm_alone() {
    const ALONE: Net = Net {
        spec: || {
            let frozen = |name: &str, channels| {
                let mut unit = Unit::new(name).batch_norm(name, channels);
                for param in &mut unit.params {
                    *param = param.clone().frozen();
                }
                unit
            };
            let first = Unit::new("first").param(Param::new("first.weight", [6, 3]));
            let head = Unit::new("head").param(Param::new("head.weight", [2, 6]));
            spec_of([frozen("norm_in", 3), first, frozen("norm_mid", 6), head])
        },
        item: &[3],
        losses: |units, batch, run| {
            let x = unit(units, ("norm_in", run), &batch.x, |p, x| norm(p, "norm_in", x))?;
            let x = unit(units, ("first", run), &x, |p, x| linear(p, "first", x))?;
            let x = unit(units, ("norm_mid", run), &x, |p, x| norm(p, "norm_mid", x)?.tanh())?;
            let y = unit(units, ("head", run), &x, |p, x| linear(p, "head", x))?;
            squares(&y, batch)
        },
    };
    for mesh in [[1, 1], [2, 2]] {
        for run in [Run::Once, Run::Recomputed] {
            Case::of(ALONE, mesh, run).check("frozen norms");
        }
    }
}

#[test]
fn a_rank_may_normalize_by_its_own_statistics() {
    let statistics = StatisticsOf::EachRank;
    for mesh in MESHES {
        for run in [Run::Once, Run::Recomputed] {
            Case { statistics, ..Case::of(OWN, mesh, run) }.check("own statistics");
        }
    }
    let case = Case { statistics, ..Case::of(OWN, [2, 2], Run::Once) };
    Case { items: &[&[5, 4, 7, 6]], ..case }.check("own statistics of different batches");
    let case = Case { statistics, ..Case::of(OWN, [2, 2], Run::Recomputed) };
    Case { items: &[&[5, 0, 4, 6], &[4, 0, 7, 5]], ..case }.check("own statistics without data");
}

/// How a net runs a norm beside the others, on which the losses of the items of rank 0 alone depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    /// On data, which has no gradient.
    OnData,
    /// On the output of another unit.
    OnUnit,
    /// On the output of another unit, which other ranks detach.
    Detached,
    /// On the output of another unit. Other ranks add the output of the norm times 0.
    TimesZero,
}

fn beside_losses(units: &dyn Units, batch: &Batch, run: Run, beside: Beside) -> Result<Tensor> {
    let counts: Vec<f32> = batch.ranks.iter().map(|it| if *it == 0 { 1.0 } else { 0.0 }).collect();
    let has_none = !counts.contains(&1.0);
    let counts = Tensor::new(counts, batch.x.device())?;
    let first = unit(units, ("first", run), &batch.x, |p, x| {
        norm(p, "norm0", &linear(p, "first", x)?)?.tanh()
    })?;
    let input = match beside {
        Beside::OnData => Tensor::cat(&[&batch.x, &batch.x], 1)?,
        Beside::OnUnit | Beside::TimesZero => first.clone(),
        Beside::Detached if has_none => first.detach(),
        Beside::Detached => {
            let counts = counts.unsqueeze(1)?;
            let kept = first.broadcast_mul(&counts)?;
            kept.add(&first.detach().broadcast_mul(&counts.affine(-1.0, 1.0)?)?)?
        }
    };
    let second = unit(units, ("beside", run), &input, |p, x| {
        linear(p, "beside", &norm(p, "norm_beside", x)?)
    })?;
    let y = unit(units, ("head", run), &first, |p, x| linear(p, "head", x))?;
    let losses = squares(&y, batch)?;
    match has_none && beside != Beside::TimesZero {
        true => Ok(losses),
        false => losses.add(&squares(&second, batch)?.mul(&counts)?),
    }
}

fn beside_spec() -> ModelSpec {
    let [first, _, head] = dense_units();
    let beside = Unit::new("beside").batch_norm("norm_beside", 6);
    spec_of([first, beside.param(Param::new("beside.weight", [2, 6])), head])
}

const ON_UNIT: Net = Net {
    spec: beside_spec,
    losses: |units, batch, run| beside_losses(units, batch, run, Beside::OnUnit),
    ..DENSE
};

#[test]
fn a_loss_need_not_depend_on_a_norm_of_data() {
    let nets: [Net; 3] = [
        Net { losses: |u, b, run| beside_losses(u, b, run, Beside::OnData), ..ON_UNIT },
        Net { losses: |u, b, run| beside_losses(u, b, run, Beside::Detached), ..ON_UNIT },
        Net { losses: |u, b, run| beside_losses(u, b, run, Beside::TimesZero), ..ON_UNIT },
    ];
    for (net, beside) in nets.into_iter().zip(["data", "detached input", "times 0"]) {
        for mesh in [[1, 2], [2, 2]] {
            for run in [Run::Once, Run::Recomputed] {
                Case::of(net, mesh, run).check(beside);
            }
        }
    }
}

/// The loss of rank 0 depends on the batches of the others through the statistics.
#[test]
fn a_loss_without_a_norm_that_other_losses_depend_on_is_refused() {
    for run in [Run::Once, Run::Recomputed] {
        let case = Case::of(ON_UNIT, [1, 2], run);
        let ends = results(2, |world| case.train_rank(world).expect_err("gradients would be lost"));
        assert!(
            matches!(&ends[1], Error::LostGradients(LostGradients::Unreached { unit })
                if unit == "beside"),
            "{run:?}: {:?}",
            ends[1]
        );
        let told = ends[0].to_string();
        assert!(told.contains("rank 1") && told.contains("statistics of unit beside"), "{told}");
    }
}

/// The second run finds that no gradient comes to the norm, and its unit waits for none.
#[test]
fn a_frozen_norm_of_data_in_a_recomputed_unit_delays_no_reduction() {
    let spec = || {
        let first = Unit::new("first").param(Param::new("first.weight", [6, 3]));
        let second = Unit::new("second").param(Param::new("second.weight", [2, 6]));
        let mut second = second.batch_norm("norm_in", 6);
        for param in second.params.iter_mut().filter(|it| it.name.starts_with("norm_in")) {
            *param = param.clone().frozen();
        }
        spec_of([first, second])
    };
    let events = results(2, |world| {
        let mesh = Mesh::new(1, 2).expect("two shards");
        let options = ModelOptions { prefetch: 0, ..ModelOptions::on(mesh) };
        let mut model = common::sharded_with(world, spec(), options);
        model.record_events();
        let gradients = common::step(&mut model, |pass| {
            let x = noise(1, &[5, 3], DType::F32);
            let x = pass.recomputed("first", &x, |p, x| linear(p, "first", x))?;
            let y = pass.recomputed("second", &x, |p, x| {
                linear(p, "second", &norm(p, "norm_in", &x.detach())?.add(x)?)
            })?;
            y.sqr()?.mean_all()
        });
        drop(gradients.expect("a step"));
        common::words(&model.take_events())
    });
    let want = [
        "gather 0 forward",
        "gather 1 forward",
        "gather 1 backward",
        "reduce 1",
        "gather 0 backward",
        "reduce 0",
    ];
    events.iter().for_each(|words| assert_eq!(words, &want));
}

/// Returns the gradients of the one step of a training: the way that parameters went, divided by the
/// rate.
fn gradients(case: &Case, trained: &Named) -> BTreeMap<String, Vec<f64>> {
    let spec = (case.net.spec)();
    let of = |(name, values): (&String, &Vec<f32>)| {
        let before = initial_of(&spec, name);
        let pairs = before.iter().zip(values);
        let way = pairs.map(|(before, after)| (f64::from(*before) - f64::from(*after)) / RATE);
        spec.find(name).map(|_| (name.clone(), way.collect()))
    };
    trained.iter().filter_map(of).collect()
}

/// Each rank's gradients in the graph of 16 bits are in units of its own: its weight multiplies
/// them later, in f32. The sums of a norm's backward add those of all ranks.
#[test]
fn in_bf16_gradients_are_off_by_the_rounding_of_one_rank() {
    const ITEMS: &[&[usize]] = &[&[2, 31, 1, 11]];
    let f32 = Precision::default();
    let bf16 = Precision::compute_in(HsdpDType::BF16);
    let norm = |of: &[f64]| of.iter().map(|it| it * it).sum::<f64>().sqrt();
    for objective in [Objective::WeightedMean, Objective::RankMean] {
        for net in [DENSE, COMPOSED] {
            for run in [Run::Once, Run::Recomputed] {
                let case = Case { objective, items: ITEMS, steps: 1, ..Case::of(net, [2, 2], run) };
                let of = |precision| Case { precision, ..case };
                let exact = gradients(&case, &of(f32).whole().values);
                let whole = gradients(&case, &of(bf16).whole().values);
                let sharded = gradients(&case, &of(bf16).sharded().values);
                for (name, exact) in &exact {
                    let off = |of: &BTreeMap<String, Vec<f64>>| {
                        let pairs = of[name].iter().zip(exact);
                        norm(&pairs.map(|(got, want)| got - want).collect::<Vec<_>>()) / norm(exact)
                    };
                    let (sharded, whole) = (off(&sharded), off(&whole));
                    let what = format!("{objective:?}, {run:?}: {name}");
                    let bound = whole + 4.0 * 2_f64.powi(-8); // four steps of bf16
                    assert!(sharded <= bound, "{what} is off by {sharded}, whole by {whole}");
                }
            }
        }
    }
}

/// The second run of a recomputed unit writes nothing.
#[test]
fn recomputation_moves_running_statistics_once() {
    let [once, again] =
        [Run::Once, Run::Recomputed].map(|run| Case::of(DENSE, [1, 2], run).sharded());
    common::assert_same_bits(&again.values, &once.values);
    assert_eq!(again.losses, once.losses);
    let moved = |trained: &Trained| trained.values["norm0.running_mean"].clone();
    assert_ne!(moved(&once), initial(&Param::new("norm0.running_mean", [6])));
}
