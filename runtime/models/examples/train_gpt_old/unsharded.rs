//! The model on whole parameters: every rank's microbatches one by one, and the sum of their
//! gradients.

use std::collections::BTreeMap;

use candle_core::Device;
use hsdp::prelude::*;
use hsdp::{Accumulation, Axis, Rank, kernels};
use hsdp_candle::Plain;
use hsdp_models::gpt::{self, GptConfig};

use super::options::Options;
use super::recipe;
use super::shared::failure::Failure;
use super::shared::recipe::precision;
use super::text::Place;
use super::train::Job;
use super::update::adamw_step;
use super::verify::norm;

/// The values of each parameter, by its name, row-major.
pub(crate) type Tensors = BTreeMap<String, Vec<f32>>;

/// Whole parameters, and the state of AdamW for them.
#[derive(Debug)]
pub(crate) struct Unsharded {
    config: GptConfig,
    precision: Precision,
    parameters: Tensors,
    first_moments: Tensors,
    second_moments: Tensors,
    updates: u64,
}

/// A step's gradients before the division, and the weight that divides them.
#[derive(Debug)]
pub(crate) struct Summed {
    sums: Tensors,
    /// The sums of the absolute contributions.
    magnitudes: Tensors,
    /// By rank: the losses of its microbatches, each times its weight.
    losses: Vec<f64>,
    weight: u64,
}

impl Unsharded {
    pub(crate) fn new(job: &Job<'_>) -> Self {
        let config = *job.gpt.config();
        let spec = config.spec();
        let parameters: Tensors = spec
            .params()
            .map(|(_, param)| (param.name.clone(), gpt::init(param, job.options.seed)))
            .collect();
        let zeros: Tensors = parameters
            .iter()
            .map(|(name, values)| (name.clone(), vec![0.0; values.len()]))
            .collect();
        Self {
            config,
            precision: precision(&job.options.run),
            parameters,
            first_moments: zeros.clone(),
            second_moments: zeros,
            updates: 0,
        }
    }

    pub(crate) fn parameters(&self) -> &Tensors {
        &self.parameters
    }

    pub(crate) fn take_over(&mut self, parameters: Tensors) {
        self.parameters = parameters;
    }

    /// The gradients of all ranks and microbatches of a step, added up in the mesh's order.
    pub(crate) fn gradients(
        &self,
        (job, device): (&Job<'_>, &Device),
        step: usize,
    ) -> Result<Summed, Failure> {
        let plain = Plain::on(self.config.spec(), &self.parameters, self.precision, device)?;
        let mesh = job.options.run.mesh;
        let mut losses = vec![0.0; mesh.world_size()];
        let mut magnitudes = self.parameters.clone();
        magnitudes.values_mut().flatten().for_each(|value| *value = 0.0);
        let mut one = |microbatch, rank: Rank| {
            let (loss, gradient) =
                one_microbatch((job, device), &plain, Place { step, microbatch, rank })?;
            losses[rank.index()] += loss;
            for (name, magnitude) in &mut magnitudes {
                add(magnitude, gradient[name].iter().map(|value| value.abs()));
            }
            Ok(gradient)
        };
        let sums =
            in_order(mesh, job.options.run.microbatches, job.options.run.accumulation, &mut one)?;
        let microbatches = (job.options.run.microbatches * mesh.world_size()) as u64;
        Ok(Summed { sums, magnitudes, losses, weight: job.options.tokens() * microbatches })
    }

    /// One update by AdamW.
    pub(crate) fn update(&mut self, summed: &Summed, options: &Options, learning_rate: f64) {
        self.updates += 1;
        let adamw = AdamWOptions { learning_rate, ..recipe::adamw(options) };
        let step = adamw_step(&adamw, self.updates, summed.norm());
        for (name, gradient) in summed.gradients() {
            let [parameter, first, second] =
                [&mut self.parameters, &mut self.first_moments, &mut self.second_moments]
                    .map(|tensors| tensors.get_mut(&name).map_or(&mut [][..], Vec::as_mut_slice));
            kernels::adamw(&step, parameter, &gradient, first, second);
        }
    }
}

impl Summed {
    /// The loss, the mean over all tokens.
    pub(crate) fn loss(&self) -> f64 {
        self.losses.iter().sum::<f64>() / self.weight as f64
    }

    /// The gradients of that mean.
    pub(crate) fn gradients(&self) -> Tensors {
        #[expect(clippy::cast_possible_truncation, reason = "the one rounding of the division")]
        let divide = |sum: &f32| (f64::from(*sum) / self.weight as f64) as f32;
        self.sums
            .iter()
            .map(|(name, sums)| (name.clone(), sums.iter().map(divide).collect()))
            .collect()
    }

    /// The norm of all these gradients together.
    pub(crate) fn norm(&self) -> f64 {
        norm(self.sums.values().flatten().copied()) / self.weight as f64
    }

    /// The norm of the absolute contributions to the gradient of `name`.
    pub(crate) fn magnitude(&self, name: &str) -> f64 {
        norm(self.magnitudes[name].iter().copied()) / self.weight as f64
    }
}

/// The loss of one rank's microbatch, times its weight, and the gradients of that.
fn one_microbatch(
    (job, device): (&Job<'_>, &Device),
    plain: &Plain,
    place: Place,
) -> Result<(f64, Tensors), Failure> {
    let batch = job.corpus.batch(place, device)?;
    let weight = job.options.tokens() as f64;
    let loss = job.gpt.loss(plain, &batch.inputs, &batch.targets)?;
    let gradients = (&loss * weight)?.backward()?;
    let mut tensors = Tensors::new();
    for (name, var) in plain.parameters() {
        let gradient = gradients
            .get(var)
            .ok_or_else(|| Failure::training(format!("the unsharded {name} has no gradient")))?;
        let values = gradient.flatten_all()?.to_dtype(candle_core::DType::F32)?.to_vec1()?;
        tensors.insert(name.clone(), values);
    }
    Ok((f64::from(loss.to_scalar::<f32>()?) * weight, tensors))
}

/// Computes the gradients of a microbatch on a rank.
type One<'a> = &'a mut dyn FnMut(usize, Rank) -> Result<Tensors, Failure>;

/// Adds up the gradients that `one` returns for every microbatch and rank, in the order of the accumulation mode.
fn in_order(
    mesh: Mesh,
    microbatches: usize,
    mode: Accumulation,
    one: One<'_>,
) -> Result<Tensors, Failure> {
    let rows: Vec<Vec<Rank>> = (0..mesh.replicate_size())
        .map(|row| mesh.group(Axis::Shard, Rank::new(row * mesh.shard_size())))
        .collect();
    match mode {
        // Each row of shards adds up a microbatch, then its microbatches; then the rows are added.
        Accumulation::ReduceScatter => sum(rows.iter().map(|row| {
            sum((0..microbatches)
                .map(|microbatch| sum(row.iter().map(|rank| one(microbatch, *rank)))))
        })),
        // Each microbatch is added up over all ranks; then the microbatches.
        Accumulation::Every => sum((0..microbatches).map(|microbatch| {
            sum(rows.iter().map(|row| sum(row.iter().map(|rank| one(microbatch, *rank)))))
        })),
        // Each rank adds up its microbatches; then the shards, then the rows.
        Accumulation::Local => sum(rows.iter().map(|row| {
            sum(row
                .iter()
                .map(|rank| sum((0..microbatches).map(|microbatch| one(microbatch, *rank)))))
        })),
    }
}

fn sum(mut parts: impl Iterator<Item = Result<Tensors, Failure>>) -> Result<Tensors, Failure> {
    let first = parts.next().unwrap_or_else(|| Ok(Tensors::new()))?;
    parts.try_fold(first, |mut total, part| {
        for (name, values) in part? {
            add(total.entry(name).or_default(), values.into_iter());
        }
        Ok(total)
    })
}

fn add(total: &mut [f32], values: impl Iterator<Item = f32>) {
    for (total, value) in total.iter_mut().zip(values) {
        *total += value;
    }
}
