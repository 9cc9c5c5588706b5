//! The optimizers of `--optimizer`, with one recipe each.

use hsdp::checkpoint::Checkpointed;
use hsdp::kernels::EIGHT_BIT_BLOCK;
use hsdp::prelude::*;
use hsdp::{
    Adafactor, AdafactorOptions, Ema, Error, Gradients, Lion, LionOptions, Muon, MuonOptions,
    State, Update,
};

use super::options::{Optimizer as Choice, Options};

/// The optimizers of a run: one, or two that share the parameters.
pub(crate) trait Optimizers: Checkpointed {
    /// Those of the options.
    ///
    /// # Errors
    /// Those of [`Ema::new`].
    fn new(model: &ShardedModel, options: &Options) -> Result<Self, Error>;

    /// The average of weights that is kept beside, if there is one.
    fn average(&self) -> Option<&Ema> {
        None
    }

    /// Updates all parameters.
    ///
    /// # Errors
    /// Those of [`ShardedModel::update_by`].
    fn update(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error>;
}

/// The weight decay of parameters of at least two dims. Norms do not decay.
const DECAY: f64 = 0.1;

/// The rate of matrices that Muon updates, in rates of the rest.
const MUON_RATES: f64 = 5.0;

/// The model as the optimizer of the options needs it declared.
pub(crate) fn declared(spec: ModelSpec, options: &Options) -> ModelSpec {
    let state = |param: &Param| match options.optimizer {
        Choice::Adamw => State::Elements(2),
        Choice::Muon if is_in_layer(param) => State::Muon,
        Choice::Muon => State::Elements(2),
        Choice::Lion => State::Elements(1),
        Choice::Adafactor => State::Factored,
        Choice::Adamw8bit => State::EightBit { block: EIGHT_BIT_BLOCK },
    };
    let spec = match options.optimizer {
        Choice::Adamw8bit => spec.in_blocks(EIGHT_BIT_BLOCK).updated_by(state),
        _ => spec.updated_by(state),
    };
    if options.ema.is_some() { spec.averaged() } else { spec }
}

/// Whether Muon updates a parameter: a matrix of a layer.
fn is_in_layer(param: &Param) -> bool {
    param.name.starts_with("model.layers.") && param.shape.len() == 2
}

fn decays(param: &Param) -> bool {
    param.shape.len() >= 2
}

fn adamw(options: &Options) -> AdamWOptions {
    let learning_rate = options.lr.unwrap_or(2e-3);
    AdamWOptions { learning_rate, betas: (0.9, 0.95), weight_decay: 0.0, ..Default::default() }
}

fn decaying(options: AdamWOptions) -> AdamWOptions {
    AdamWOptions { weight_decay: DECAY, ..options }
}

impl Optimizers for AdamW {
    fn new(model: &ShardedModel, options: &Options) -> Result<Self, Error> {
        let new = match options.optimizer {
            Choice::Adamw8bit => Self::with_eight_bit_state,
            _ => Self::new,
        };
        Ok(new(model, adamw(options)).group(decays, decaying))
    }

    fn update(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        self.step(model, gradients)
    }
}

impl Optimizers for Lion {
    fn new(model: &ShardedModel, options: &Options) -> Result<Self, Error> {
        let learning_rate = options.lr.unwrap_or(2e-4);
        let decaying = |options| LionOptions { weight_decay: DECAY, ..options };
        let lion = LionOptions { learning_rate, ..Default::default() };
        Ok(Self::new(model, lion).group(decays, decaying))
    }

    fn update(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        self.step(model, gradients)
    }
}

impl Optimizers for Adafactor {
    fn new(model: &ShardedModel, options: &Options) -> Result<Self, Error> {
        let learning_rate = options.lr.unwrap_or(1e-2);
        Ok(Self::new(model, AdafactorOptions { learning_rate, ..Default::default() }))
    }

    fn update(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        self.step(model, gradients)
    }
}

impl Optimizers for (Muon, AdamW) {
    fn new(model: &ShardedModel, options: &Options) -> Result<Self, Error> {
        let learning_rate = MUON_RATES * adamw(options).learning_rate;
        let muon = MuonOptions { learning_rate, weight_decay: DECAY, ..Default::default() };
        Ok((Muon::new(model, muon), <AdamW as Optimizers>::new(model, options)?))
    }

    fn update(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        let (muon, adamw) = self;
        model.update_by(gradients, [(muon, is_in_layer), (adamw, |param| !is_in_layer(param))])
    }
}

/// Optimizers with an average of the weights.
impl<O: Optimizers> Optimizers for (O, Ema) {
    fn new(model: &ShardedModel, options: &Options) -> Result<Self, Error> {
        let decay = options.ema.expect("the options ask for an average");
        Ok((O::new(model, options)?, Ema::new(model, decay)?))
    }

    fn average(&self) -> Option<&Ema> {
        Some(&self.1)
    }

    fn update(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        self.0.update(model, gradients)
    }
}
