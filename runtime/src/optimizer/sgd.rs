//! SGD, with momentum if wanted, as PyTorch computes it.

use hsdp_kernels::{MomentumKind, SgdStep};

use crate::error::Error;
use crate::gradients::Gradients;
use crate::model::{ModelId, ShardedModel};
use crate::optimizer::{Optimizer, Update, check_owner, state_like_shards};

/// Whether and how past gradients enter an update.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Momentum {
    /// Not at all; no state is kept.
    #[default]
    Off,
    /// The update follows a velocity, of which this part is kept.
    Classic(f64),
    /// Likewise, looking one step ahead.
    Nesterov(f64),
}

/// The parameters of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// The learning rate.
    pub learning_rate: f64,
    /// Whether and how past gradients enter.
    pub momentum: Momentum,
    /// What part of a parameter is added to its gradient.
    pub weight_decay: f64,
}

impl Default for SgdOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-2, momentum: Momentum::Off, weight_decay: 0.0 }
    }
}

/// SGD on this rank's shards, with state in f32.
#[derive(Debug)]
pub struct Sgd {
    model: ModelId,
    options: SgdOptions,
    /// One f32 for each trainable element; nothing without momentum.
    velocities: Option<Vec<Vec<f32>>>,
}

impl Sgd {
    /// Makes the state for this rank's shards of `model`.
    #[must_use]
    pub fn new(model: &ShardedModel, options: SgdOptions) -> Self {
        let velocities = (options.momentum != Momentum::Off).then(|| state_like_shards(model));
        Self { model: model.id().clone(), options, velocities }
    }
}

impl Optimizer for Sgd {
    fn step(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        check_owner(&self.model, model, &gradients)?;
        let Self { options, velocities, .. } = self;
        let (momentum, kind) = match options.momentum {
            Momentum::Off => (0.0, MomentumKind::Classic),
            Momentum::Classic(momentum) => (momentum, MomentumKind::Classic),
            Momentum::Nesterov(momentum) => (momentum, MomentumKind::Nesterov),
        };
        let (learning_rate, weight_decay) = (options.learning_rate, options.weight_decay);
        model.update(gradients, |run| {
            let range = run.piece.shard_range();
            let velocity = velocities.as_mut().map(|all| &mut all[run.unit.index()][range]);
            let step = SgdStep { learning_rate, momentum, kind, weight_decay, clip: run.clip };
            hsdp_kernels::sgd(&step, run.parameters, run.gradient, velocity);
        })
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.options.learning_rate = rate;
    }
}
