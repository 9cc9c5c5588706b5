//! The perceptron, sharded and whole.

use hsdp::{
    Accumulation, AdamW, AdamWOptions, Error, Full, LossSum, Mesh, ModelOptions, MomentumKind,
    Objective, Optimizer, Sgd, SgdOptions, ShardedModel, Step, StepOptions, UnitGradients, World,
};
use hsdp_tests::support::handmade::in_f32;
use hsdp_tests::support::models::unit;
use hsdp_tests::support::worlds::{common, on_ranks};

use crate::parity::baseline::{Average, Averaged, Contributions, Recipe, WholeOptimizer};
use crate::parity::mlp::{self, Activations, Items, Layer, LayerGradient};
use crate::parity::{Named, Trace, assert_near, assert_same_bits, meshes};

const STEPS: usize = 3;
const MICROBATCHES: usize = 3;

/// One training run.
#[derive(Clone, Copy, Debug)]
struct Run {
    mesh: Mesh,
    accumulation: Accumulation,
    objective: Objective,
    recipe: Recipe,
    max_norm: Option<f64>,
}

/// The items of a rank in a microbatch: one to four, which no other has.
fn items(step: usize, microbatch: usize, rank: usize) -> Items {
    let first = 4 * ((step * MICROBATCHES + microbatch) * 8 + rank);
    first..first + 1 + (step + microbatch + rank) % 4
}

impl Run {
    /// The run on threads: what all ranks end each step with.
    fn sharded(&self) -> Vec<Trace> {
        common(on_ranks(self.mesh.world_size(), |world| self.rank(world)))
    }

    fn rank(&self, world: World) -> Result<Vec<Trace>, Error> {
        let rank = world.rank().index();
        let options = ModelOptions {
            accumulation: self.accumulation,
            objective: self.objective,
            ..ModelOptions::on(self.mesh)
        };
        let mut model = ShardedModel::new(world, mlp::spec(), options, mlp::initial)?;
        let mut optimizer = self.recipe.optimizer(&model);
        let mut traces = Vec::new();
        for step_index in 0..STEPS {
            let mut step = model.begin_step(StepOptions::microbatches(MICROBATCHES))?;
            for microbatch in 0..MICROBATCHES {
                forward_and_backward(&mut step, items(step_index, microbatch, rank))?;
            }
            let gradients = step.finish()?;
            let loss = gradients.loss();
            let norm = gradients.norm();
            let full = gradients.full(&model)?;
            let clipped = match self.max_norm {
                Some(max_norm) => gradients.clip(max_norm),
                None => gradients,
            };
            optimizer.step(&mut model, clipped)?;
            traces.push(Trace {
                loss,
                norm,
                gradients: full,
                parameters: model.full_parameters()?,
            });
        }
        Ok(traces)
    }

    /// Compares a sharded run with the same run on whole parameters.
    fn compare(&self, sharded: &[Trace]) {
        let context = format!("{self:?}");
        let mut parameters: Named = mlp::spec()
            .params()
            .map(|(_, param)| (param.name.clone(), mlp::initial(param)))
            .collect();
        let mut optimizer = WholeOptimizer::new(self.recipe, &parameters);
        for (step, trace) in sharded.iter().enumerate() {
            let context = format!("step {step} of {context}");
            let (loss, Averaged { gradients, norm }) = self.whole_step(step, &parameters);
            assert_near(trace.loss, loss, &context);
            assert_near(trace.norm, norm, &context);
            assert_same_bits(&trace.gradients, &gradients, &context);
            // The norm is an f64 sum over shards: as good in another order, but not bit for bit.
            let clip = |max_norm: f64| in_f32((max_norm / (trace.norm + 1e-6)).min(1.0));
            optimizer.step(&mut parameters, &gradients, self.max_norm.map_or(1.0, clip));
            assert_same_bits(&trace.parameters, &parameters, &context);
        }
    }

    /// The loss and the gradient of a step on whole parameters.
    #[expect(clippy::cast_precision_loss, reason = "few items")]
    fn whole_step(&self, step: usize, parameters: &Named) -> (f64, Averaged) {
        let ranks = self.mesh.world_size();
        let mut weight = 0;
        let mut sum_of_losses = 0.0;
        let mut sum_of_means = 0.0;
        let mut whole = |microbatch, rank| {
            let items = items(step, microbatch, rank);
            let len = items.len();
            let count = len as f64;
            // The seeds of the other objectives are powers of two, which come out again without a
            // trace.
            let seed =
                if self.objective == Objective::RankMean { in_f32(1.0 / count) } else { 1.0 };
            let (loss, gradient) = mlp::whole_gradient(parameters, items, seed);
            weight += len as u64;
            sum_of_losses += loss;
            sum_of_means += loss / count;
            gradient
        };
        let contributions: Contributions = (0..MICROBATCHES)
            .map(|microbatch| (0..ranks).map(|rank| whole(microbatch, rank)).collect())
            .collect();
        let Self { mesh, accumulation, objective, .. } = *self;
        let averaged = Average { mesh, accumulation, objective, weight }.of(&contributions);
        let loss = match objective {
            Objective::RankMean => sum_of_means / (ranks * MICROBATCHES) as f64,
            Objective::Sum => sum_of_losses,
            Objective::Factor(factor) => sum_of_losses / factor,
            _ => sum_of_losses / weight as f64,
        };
        (loss, averaged)
    }
}

/// One microbatch, as whoever embeds the runtime writes it.
fn forward_and_backward(step: &mut Step<'_>, items: Items) -> Result<(), Error> {
    let mut pass = step.microbatch()?;
    let hidden = unit(0);
    let output = unit(1);
    let weight = items.len() as u64;
    let mut activations = Activations::hidden(lent(&pass.unshard(hidden)?), items);
    let loss = activations.output(lent(&pass.unshard(output)?));
    let seed = in_f32(pass.loss(LossSum::new(loss, weight))?.value());
    let (gradient, upstream) = activations.output_backward(lent(&pass.unshard(output)?), seed);
    pass.reduce(output, given(gradient))?;
    pass.reduce(hidden, given(activations.hidden_backward(&upstream)))?;
    pass.finish()
}

fn lent(full: &Full) -> Layer<'_> {
    let tensor = |index| full.as_f32(index).expect("the model computes in f32");
    Layer { weight: tensor(0), bias: tensor(1) }
}

fn given(gradient: LayerGradient) -> UnitGradients {
    UnitGradients::of([gradient.weight, gradient.bias])
}

impl Recipe {
    fn optimizer(self, model: &ShardedModel) -> Box<dyn Optimizer> {
        match self {
            Self::AdamW(options) => Box::new(AdamW::new(model, options)),
            Self::Sgd(options) => Box::new(Sgd::new(model, options)),
        }
    }
}

const ADAMW: Recipe = Recipe::AdamW(AdamWOptions {
    learning_rate: 3e-3,
    betas: (0.9, 0.95),
    eps: 1e-8,
    weight_decay: 0.1,
});
const MOMENTUM: Recipe = Recipe::Sgd(SgdOptions {
    learning_rate: 0.05,
    momentum: 0.9,
    momentum_kind: MomentumKind::Classic,
    weight_decay: 0.01,
});

fn run(mesh: Mesh, accumulation: Accumulation, objective: Objective, recipe: Recipe) -> Run {
    Run { mesh, accumulation, objective, recipe, max_norm: None }
}

fn equals_the_baseline_with(recipe: Recipe) {
    let objectives =
        [Objective::WeightedMean, Objective::RankMean, Objective::Sum, Objective::Factor(3.0)];
    for mesh in meshes() {
        for accumulation in Accumulation::ALL {
            for objective in objectives {
                let run = run(mesh, accumulation, objective, recipe);
                run.compare(&run.sharded());
            }
        }
    }
}

#[test]
fn training_with_adamw_equals_the_baseline_bit_for_bit() {
    equals_the_baseline_with(ADAMW);
}

#[test]
fn training_with_momentum_equals_the_baseline_bit_for_bit() {
    equals_the_baseline_with(MOMENTUM);
}

#[test]
fn training_with_clipped_gradients_equals_the_baseline() {
    for mesh in meshes() {
        let run = run(mesh, Accumulation::ReduceScatter, Objective::WeightedMean, ADAMW);
        let run = Run { max_norm: Some(0.1), ..run };
        let traces = run.sharded();
        assert!(traces.iter().all(|trace| trace.norm > 0.1), "{mesh}: every step is clipped");
        run.compare(&traces);
    }
}

#[test]
fn a_run_is_bit_identical_when_it_is_run_again() {
    for accumulation in Accumulation::ALL {
        let run = run(meshes()[4], accumulation, Objective::WeightedMean, MOMENTUM);
        let first = run.sharded();
        for again in 0..3 {
            assert_eq!(run.sharded(), first, "{accumulation}, time {again}");
        }
    }
}

/// Sharding is a layout, not a sum: four ranks in mode `Local` add the same numbers in the same
/// order, whether they are one replica or four.
#[test]
fn four_ranks_add_the_same_bits_on_either_axis() {
    let one_step = |mesh| {
        let run = run(mesh, Accumulation::Local, Objective::Sum, MOMENTUM);
        run.sharded().swap_remove(0).gradients
    };
    let [row, column] = [meshes()[1], meshes()[3]].map(one_step);
    assert_same_bits(&row, &column, "1x4 against 4x1");
}
