//! The finished gradients of a step: the only thing that drives an optimizer.

use std::collections::BTreeMap;

use hsdp_kernels::scaled_copy;
use hsdp_sharding::{ParamId, UnitId};

use crate::engine::fabric::Fabric;
use crate::engine::recycled::GradShards;
use crate::error::Error;
use crate::export;
use crate::model::{ModelId, ShardedModel};
use crate::non_finite::NonFiniteGradient;

/// What all ranks agreed to do with a step's gradients.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Update the parameters.
    Apply,
    /// Leave them as they are.
    Skip(NonFiniteGradient),
}

/// This rank's shard of a step's gradient, reduced over both axes, and agreed on by all ranks.
///
/// What is left to be done to it, the one division of the step and clipping, is done where it is read: by the optimizer in
/// the pass that it makes anyway, and in the copies that [`shard`](Self::shard) and [`full`](Self::full) give.
///
/// Its memory serves the next step: drop it before, or that one needs as much again.
///
/// It comes out of [`Step::finish`](crate::Step::finish) and nowhere else, so a step whose all-reduce
/// was forgotten cannot reach an optimizer.
#[derive(Debug)]
#[must_use = "gradients that no optimizer takes change nothing"]
pub struct Gradients {
    pub(crate) model: ModelId,
    pub(crate) step: u64,
    /// By unit, still to be divided; empty where a unit has no trainable parameter. And which parameters got a gradient.
    pub(crate) grad_shards: GradShards,
    /// By what they are divided. Known only when all ranks have agreed, and so after their norm was taken.
    pub(crate) divisor: f64,
    pub(crate) norm: f64,
    pub(crate) loss: f64,
    pub(crate) weight: u64,
    pub(crate) clip: f32,
    pub(crate) verdict: Verdict,
}

impl Gradients {
    /// The number of the step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The 2-norm of the whole gradient, over all shards, before clipping.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.norm
    }

    /// The loss of the step: of `WeightedMean` all losses over all weights, of `RankMean` the mean of all means, of
    /// `Sum` the sum, of `Factor` that over the factor.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// The sum of all weights.
    #[must_use]
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// Refuses gradients that are not those of the last step of `model`: what an optimizer asks before it changes
    /// anything.
    ///
    /// # Errors
    /// [`Error::Misuse`], which names both steps, or says that the model is another.
    pub fn check_model(&self, model: &ShardedModel) -> Result<(), Error> {
        let refuse = |what| Err(model.engine.fabric.misuse("optimizer step", self.step, what));
        let finished = model.engine.state().next_step;
        if self.model != *model.id() {
            return refuse("these are the gradients of another model".to_owned());
        }
        if self.step + 1 != finished {
            return refuse(format!(
                "the gradients are those of step {}, the model has finished {finished}",
                self.step
            ));
        }
        Ok(())
    }

    /// By what gradients are multiplied before anything else: what [`clip`](Self::clip) asked for, or 1.
    #[must_use]
    pub fn clip_factor(&self) -> f32 {
        self.clip
    }

    /// What all ranks agreed to do with these gradients.
    #[must_use]
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// Scales the gradient down to `max_norm`, if it is longer: by max_norm / (norm + 1e-6), as PyTorch does.
    ///
    /// The factor is applied by the optimizer, in the pass that it makes anyway.
    ///
    /// # Panics
    /// If `max_norm` is NaN or below 0.
    pub fn clip(mut self, max_norm: f64) -> Self {
        assert!(max_norm >= 0.0, "gradients cannot be clipped to a norm of {max_norm}");
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a factor of at most 1, applied in f32"
        )]
        let factor = (max_norm / (self.norm + 1e-6)).min(1.0) as f32;
        self.clip = factor;
        self
    }

    /// A copy of this rank's shard of a unit's gradient, in the layout's order, divided, before clipping; empty if nothing in
    /// it is trainable.
    ///
    /// Where the ranks agreed to skip the step it is what the reductions gave, divided by nothing.
    ///
    /// # Errors
    /// [`Error::Device`](Error) if they lie on a device that fails.
    ///
    /// # Panics
    /// If the model has no such unit.
    pub fn shard(&self, model: &ShardedModel, unit: UnitId) -> Result<Vec<f32>, Error> {
        self.shard_in(&model.engine.fabric, unit)
    }

    pub(crate) fn shard_in(&self, fabric: &Fabric, unit: UnitId) -> Result<Vec<f32>, Error> {
        let grad_shard = self.grad_shards[unit.index()].to_host(fabric, self.step)?;
        let mut divided = vec![0.0; grad_shard.len()];
        scaled_copy(&mut divided, &grad_shard, self.divisor);
        Ok(divided)
    }

    /// Whether the parameter got a gradient on any rank in any microbatch of the step.
    ///
    /// # Panics
    /// If the model has no such parameter.
    #[must_use]
    pub fn has_gradient(&self, parameter: ParamId) -> bool {
        self.grad_shards.present()[parameter.unit.index()][parameter.index]
    }

    /// The whole gradients of all trainable parameters, by name, before clipping. For tests and small models.
    ///
    /// Collective over the shard group, one gather a unit; every rank gets all of it.
    ///
    /// # Errors
    /// [`Error::Comm`] if a gather fails.
    pub fn full(&self, model: &ShardedModel) -> Result<BTreeMap<String, Vec<f32>>, Error> {
        export::full_gradients(&model.engine.fabric, self)
    }
}
