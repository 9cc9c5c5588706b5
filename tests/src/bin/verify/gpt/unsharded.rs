//! The model on whole parameters: every rank's microbatches one by one, and the sum of their
//! gradients.

use std::collections::BTreeMap;

use candle_core::DType;
use hsdp::kernels::{self, AdamWStep};
use hsdp::prelude::*;
use hsdp::{Accumulation, Axis, Rank};
use hsdp_candle::Plain;
use hsdp_models::gpt;
use hsdp_tests::support::rules;
use hsdp_train::{Failure, Place};

use super::Job;
use crate::train_gpt::{self, MAX_NORM, Options};

/// The values of each parameter, by its name, row-major.
pub(super) type Tensors = BTreeMap<String, Vec<f32>>;

/// Whole parameters, and the state of AdamW for them.
#[derive(Debug)]
pub(super) struct Unsharded {
    parameters: Tensors,
    first_moments: Tensors,
    second_moments: Tensors,
    updates: u64,
}

/// A step's gradients before the division, and the weight that divides them.
#[derive(Debug)]
pub(super) struct Summed {
    sums: Tensors,
    /// Sums of the absolute contributions.
    magnitudes: Tensors,
    /// Losses of the microbatches of each rank, each times its weight.
    losses: Vec<f64>,
    weight: u64,
}

impl Unsharded {
    pub(super) fn new(job: &Job<'_>) -> Self {
        let spec = job.inputs.gpt.config().spec();
        let init = |param: &Param| (param.name.clone(), gpt::init(param, job.options.seed));
        let parameters: Tensors = spec.params().map(|(_, param)| init(param)).collect();
        let zeros = zeros(&parameters);
        Self { parameters, first_moments: zeros.clone(), second_moments: zeros, updates: 0 }
    }

    pub(super) fn parameters(&self) -> &Tensors {
        &self.parameters
    }

    pub(super) fn take_over(&mut self, parameters: Tensors) {
        self.parameters = parameters;
    }

    /// Returns the gradients of all ranks and microbatches of a step, added up in the mesh's order.
    pub(super) fn gradients(&self, job: &Job<'_>, step: u64) -> Result<Summed, Failure> {
        let run = &job.options.run;
        let spec = job.inputs.gpt.config().spec();
        let plain = Plain::on(spec, &self.parameters, run.model().precision, &job.device)?;
        let mut losses = vec![0.0; run.mesh.world_size()];
        let mut magnitudes = zeros(&self.parameters);
        let mut one = |microbatch, rank: Rank| {
            let (loss, gradient) = one_microbatch(job, &plain, Place { step, microbatch, rank })?;
            losses[rank.index()] += loss;
            for (name, magnitude) in &mut magnitudes {
                add(magnitude, gradient[name].iter().map(|value| value.abs()));
            }
            Ok(gradient)
        };
        let sums = in_order(run.mesh, run.microbatches, run.accumulation, &mut one)?;
        let microbatches = (run.microbatches * run.mesh.world_size()) as u64;
        Ok(Summed { sums, magnitudes, losses, weight: job.options.tokens() * microbatches })
    }

    /// Makes one update by AdamW.
    pub(super) fn update(&mut self, summed: &Summed, options: &Options, learning_rate: f64) {
        self.updates += 1;
        let adamw = AdamWOptions { learning_rate, ..train_gpt::recipe(options) };
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
    /// Returns the loss, the mean over all tokens.
    pub(super) fn loss(&self) -> f64 {
        self.losses.iter().sum::<f64>() / self.weight as f64
    }

    /// Returns the gradients of that mean.
    pub(super) fn gradients(&self) -> Tensors {
        #[expect(clippy::cast_possible_truncation, reason = "the one rounding of the division")]
        let divide = |sum: &f32| (f64::from(*sum) / self.weight as f64) as f32;
        let mean = |sums: &Vec<f32>| sums.iter().map(divide).collect();
        self.sums.iter().map(|(name, sums)| (name.clone(), mean(sums))).collect()
    }

    /// Returns the norm of all these gradients together.
    pub(super) fn norm(&self) -> f64 {
        norm(self.sums.values().flatten().copied()) / self.weight as f64
    }

    /// Returns the norm of the absolute contributions to the gradient of `name`.
    pub(super) fn magnitude(&self, name: &str) -> f64 {
        norm(self.magnitudes[name].iter().copied()) / self.weight as f64
    }
}

/// Returns update number `step`, counted from 1, by a gradient of this norm.
pub(crate) fn adamw_step(options: &AdamWOptions, step: u64, norm: f64) -> AdamWStep {
    #[expect(clippy::cast_possible_truncation, reason = "a factor of at most 1, applied in f32")]
    let clip = (MAX_NORM / (norm + 1e-6)).min(1.0) as f32;
    rules::adamw_step(*options, step, clip)
}

/// Returns the 2-norm of some numbers, in f64.
pub(super) fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

/// Returns the loss of one rank's microbatch, times its weight, and the gradients of that.
fn one_microbatch(job: &Job<'_>, plain: &Plain, place: Place) -> Result<(f64, Tensors), Failure> {
    let Job { options, inputs, device } = job;
    let [tokens, targets] = train_gpt::batch(options, &inputs.text, place, device)?;
    let weight = options.tokens() as f64;
    let loss = inputs.gpt.loss(plain, &tokens, &targets)?;
    let gradients = (&loss * weight)?.backward()?;
    let mut tensors = Tensors::new();
    for (name, var) in plain.parameters() {
        let gradient = gradients
            .get(var)
            .ok_or_else(|| Failure::work(format!("the unsharded {name} has no gradient")))?;
        let values = gradient.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
        tensors.insert(name.clone(), values);
    }
    Ok((f64::from(loss.to_scalar::<f32>()?) * weight, tensors))
}

/// Computes the gradients of a microbatch on a rank.
type One<'a> = &'a mut dyn FnMut(usize, Rank) -> Result<Tensors, Failure>;

/// Adds up the gradients that `one` returns for every microbatch and rank, in the order of the
/// accumulation mode.
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

/// Returns zeros in the shapes of `tensors`.
fn zeros(tensors: &Tensors) -> Tensors {
    tensors.iter().map(|(name, values)| (name.clone(), vec![0.0; values.len()])).collect()
}
