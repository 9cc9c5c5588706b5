//! A sharded run of a decoder through the library, in one process.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use hsdp::prelude::*;
use hsdp::{Muon, MuonOptions};
use hsdp_candle::{Error, Pass};
use hsdp_models::decoder::{Decoder, Pretrained};

use crate::batches::Batches;

/// The seed of parameters that a folder does not have.
pub(crate) const SEED: u64 = 5;

/// The run of a model on a mesh.
pub(crate) struct Run {
    pub(crate) decoder: Decoder,
    pub(crate) model: PathBuf,
    pub(crate) mesh: Mesh,
    pub(crate) microbatches: usize,
    pub(crate) steps: usize,
    pub(crate) recipe: Recipe,
}

/// The recipes of the golden runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recipe {
    AdamW,
    /// Muon for the matrices of layers, and AdamW for the rest.
    Muon,
}

/// The optimizers of a recipe.
struct Optimizers {
    recipe: Recipe,
    muon: Muon,
    adamw: AdamW,
}

impl Optimizers {
    fn of(model: &ShardedModel, recipe: Recipe) -> Self {
        let options = MuonOptions { learning_rate: 0.01, ..MuonOptions::default() };
        Self { recipe, muon: Muon::new(model, options), adamw: adamw(model) }
    }

    fn step(&mut self, model: &mut ShardedModel, gradients: hsdp::Gradients) -> Result<(), Error> {
        let Self { muon, adamw, .. } = self;
        match self.recipe {
            Recipe::AdamW => adamw.step(model, gradients)?,
            Recipe::Muon => model.update_by(
                gradients,
                [(muon, &is_in_layer), (adamw, &|param| !is_in_layer(param))],
            )?,
        };
        Ok(())
    }
}

/// Returns whether Muon updates a parameter.
fn is_in_layer(param: &Param) -> bool {
    param.name.starts_with("model.layers.") && param.shape.len() == 2
}

/// The numbers of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Numbers {
    /// Losses by step, before its update.
    pub(crate) losses: Vec<f64>,
    /// Norms of gradients by step, before clipping.
    pub(crate) norms: Vec<f64>,
    /// Norms of the first step's gradients, by parameter.
    pub(crate) first: BTreeMap<String, f64>,
    /// Losses of held-out sequences, before the first step and after the last.
    pub(crate) held_out: [f64; 2],
}

/// Returns the model of a folder.
pub(crate) fn decoder(model: &Path) -> Decoder {
    Decoder::new(Pretrained::open(model).expect("a decoder").config().clone())
}

/// Returns the optimizer of the golden runs.
pub(crate) fn adamw(model: &ShardedModel) -> AdamW {
    let options =
        AdamWOptions { learning_rate: 2e-3, betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.0 };
    AdamW::new(model, options).group(
        |param| param.shape.len() >= 2,
        |options| AdamWOptions { weight_decay: 0.1, ..options },
    )
}

impl Run {
    /// Runs the steps. Returns the numbers, which are equal on all ranks.
    pub(crate) fn numbers(&self, batches: &Batches) -> Numbers {
        let rank = |world| self.rank(world, batches);
        let ranks = hsdp::launch(self.mesh.world_size(), WorldOptions::default(), rank);
        let mut ranks =
            ranks.into_iter().map(|rank| rank.unwrap_or_else(|error| panic!("{error}")));
        let first = ranks.next().expect("a rank");
        ranks.for_each(|other| assert_eq!(other, first));
        first
    }

    fn rank(&self, world: World, batches: &Batches) -> Result<Numbers, Error> {
        let spec = self.decoder.spec()?;
        let options = ModelOptions::on(self.mesh);
        let mut model = self.model(world, spec, options)?;
        let mut optimizers = Optimizers::of(&model, self.recipe);
        let mut numbers = Numbers::default();
        numbers.held_out[0] = self.held_out(&mut model, batches)?;
        for step in 0..self.steps {
            let gradients = self.gradients(&mut model, batches, step)?;
            numbers.losses.push(gradients.loss());
            numbers.norms.push(gradients.norm());
            if step == 0 {
                numbers.first = norms(&gradients.full(&model)?);
            }
            optimizers.step(&mut model, gradients.clip(1.0))?;
        }
        numbers.held_out[1] = self.held_out(&mut model, batches)?;
        model.end_run()?;
        Ok(numbers)
    }

    /// Loads the model of the folder, with adapters if the model has them.
    fn model(
        &self,
        world: World,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> Result<ShardedModel, Error> {
        let folder = Pretrained::open(&self.model).expect("a decoder");
        let init = self.decoder.recorded()?.init(SEED);
        Ok(folder.load(world, spec, options, init).expect("the same folder"))
    }

    fn gradients(
        &self,
        model: &mut ShardedModel,
        batches: &Batches,
        number: usize,
    ) -> Result<hsdp::Gradients, Error> {
        let rank = model.rank();
        let microbatches = self.microbatches;
        let mut step = model.begin_step(StepOptions::microbatches(microbatches))?;
        for microbatch in 0..microbatches {
            let [tokens, labels] =
                batches.of_microbatch(number, rank, microbatch, self.mesh, microbatches);
            let pass = Pass::new(step.microbatch()?)?;
            let loss = self.decoder.loss(&pass, &tokens, &labels)?;
            pass.backward_sum(&loss.sum, loss.count)?;
        }
        Ok(step.finish()?)
    }

    fn held_out(&self, model: &mut ShardedModel, batches: &Batches) -> Result<f64, Error> {
        let [tokens, labels] = batches.held_out(model.rank(), self.mesh);
        let mut evaluation = model.evaluation()?;
        let pass = Pass::new(evaluation.batch()?)?;
        let loss = self.decoder.loss(&pass, &tokens, &labels)?;
        pass.finish()?;
        Ok(evaluation.mean(number(&loss.sum)?, loss.count)?)
    }
}

fn number(scalar: &Tensor) -> Result<f64, Error> {
    Ok(f64::from(scalar.to_scalar::<f32>()?))
}

/// Computes the norm of each tensor.
pub(crate) fn norms(tensors: &BTreeMap<String, Vec<f32>>) -> BTreeMap<String, f64> {
    let norm =
        |values: &Vec<f32>| values.iter().map(|it| f64::from(*it).powi(2)).sum::<f64>().sqrt();
    tensors.iter().map(|(name, values)| (name.clone(), norm(values))).collect()
}
