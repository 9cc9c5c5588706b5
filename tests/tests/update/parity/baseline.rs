//! Unsharded arithmetic: sums in the documented order, and the optimizers on whole parameters.

use hsdp::{Accumulation, AdamWOptions, Mesh, Objective, SgdOptions};
use hsdp_kernels::SgdStep;
use hsdp_tests::support::rules::adamw_step;

use crate::parity::Named;

/// The gradients of a step before any reduction, by microbatch and rank.
pub(crate) type Contributions = Vec<Vec<Named>>;

/// How the gradients of all ranks and microbatches become one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Average {
    pub(crate) mesh: Mesh,
    pub(crate) accumulation: Accumulation,
    pub(crate) objective: Objective,
    /// Of all ranks and microbatches of the step.
    pub(crate) weight: u64,
}

/// The gradient of a step, and its norm.
#[derive(Debug)]
pub(crate) struct Averaged {
    pub(crate) gradients: Named,
    /// In f64, before the last division is rounded to f32.
    pub(crate) norm: f64,
}

impl Average {
    /// The gradient of the step.
    pub(crate) fn of(&self, contributions: &Contributions) -> Averaged {
        let total = |name: &str, index: usize| {
            self.total(contributions.len(), &|microbatch, rank| {
                contributions[microbatch][rank][name][index]
            })
        };
        let mut gradients = Named::new();
        let mut squares = 0.0;
        for (name, values) in &contributions[0][0] {
            let totals = (0..values.len()).map(|index| f64::from(total(name, index)));
            let divided = totals.map(|total| {
                squares += total * total;
                rounded(total / self.last_divisor())
            });
            gradients.insert(name.clone(), divided.collect());
        }
        Averaged { gradients, norm: squares.sqrt() / self.last_divisor() }
    }

    /// One element of it, before the last division; `part` is a rank's contribution in a
    /// microbatch.
    fn total(&self, microbatches: usize, part: &dyn Fn(usize, usize) -> f32) -> f32 {
        let shard_size = self.mesh.shard_size();
        let in_group = |microbatch, replica: usize| {
            self.over_axis(shard_size, &|index| part(microbatch, replica * shard_size + index))
        };
        let partial =
            |replica: usize| sum(microbatches, &|microbatch| in_group(microbatch, replica));
        let replicas = self.mesh.replicate_size();
        match self.accumulation {
            Accumulation::ReduceScatter => self.over_axis(replicas, &partial),
            // Without replicas there is nothing that is reduced every time.
            Accumulation::Every => sum(microbatches, &|microbatch| {
                self.over_axis(replicas, &|replica| in_group(microbatch, replica))
            }),
            Accumulation::Local => self.over_axis(replicas, &|replica| {
                self.over_axis(shard_size, &|index| {
                    sum(microbatches, &|microbatch| part(microbatch, replica * shard_size + index))
                })
            }),
        }
    }

    /// The sum over an axis, or the mean where the objective is a mean over ranks.
    fn over_axis(&self, size: usize, part: &dyn Fn(usize) -> f32) -> f32 {
        let sum = sum(size, part);
        match self.objective {
            Objective::RankMean => sum / f32::from(u8::try_from(size).expect("few ranks")),
            _ => sum,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "weights of a test are small")]
    fn last_divisor(&self) -> f64 {
        match self.objective {
            Objective::WeightedMean => self.weight as f64,
            Objective::Factor(factor) => factor,
            _ => 1.0,
        }
    }
}

/// The f32 sum in order, which begins with the first and not with 0.
fn sum(count: usize, part: &dyn Fn(usize) -> f32) -> f32 {
    (1..count).fold(part(0), |sum, index| sum + part(index))
}

#[expect(clippy::cast_possible_truncation, reason = "one rounding, as the runtime does")]
fn rounded(value: f64) -> f32 {
    value as f32
}

/// Which optimizer a run uses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Recipe {
    AdamW(AdamWOptions),
    Sgd(SgdOptions),
}

/// A [`Recipe`] on whole parameters, with its state.
#[derive(Debug)]
pub(crate) struct WholeOptimizer {
    recipe: Recipe,
    /// First moments, or velocities.
    first: Named,
    second: Named,
    steps: u64,
}

impl WholeOptimizer {
    pub(crate) fn new(recipe: Recipe, parameters: &Named) -> Self {
        let zeros: Named = parameters
            .iter()
            .map(|(name, values)| (name.clone(), vec![0.0; values.len()]))
            .collect();
        Self { recipe, first: zeros.clone(), second: zeros, steps: 0 }
    }

    /// Updates every parameter, with gradients multiplied by `clip` first.
    pub(crate) fn step(&mut self, parameters: &mut Named, gradients: &Named, clip: f32) {
        self.steps += 1;
        for (name, parameter) in parameters {
            let gradient = &gradients[name];
            let first = self.first.get_mut(name).expect("made with these parameters");
            match self.recipe {
                Recipe::AdamW(options) => {
                    let second = self.second.get_mut(name).expect("made with these parameters");
                    let step = adamw_step(options, self.steps, clip);
                    hsdp_kernels::adamw(&step, parameter, gradient, first, second);
                }
                Recipe::Sgd(options) => {
                    hsdp_kernels::sgd(&sgd_step(options, clip), parameter, gradient, Some(first));
                }
            }
        }
    }
}

fn sgd_step(options: SgdOptions, clip: f32) -> SgdStep {
    let SgdOptions { learning_rate, momentum, momentum_kind: kind, weight_decay } = options;
    SgdStep { learning_rate, momentum, kind, weight_decay, clip }
}
