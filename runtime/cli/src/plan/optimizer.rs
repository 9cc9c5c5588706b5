//! Optimizers whose state and update can be planned.

use clap::ValueEnum;
use hsdp_kernels::EIGHT_BIT_BLOCK;
use hsdp_sharding::{ModelSpec, Param, State};

/// An optimizer, which determines the state of each trained parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Optimizer {
    /// Two f32 of state for each trained element.
    #[default]
    Adamw,
    /// No state.
    Sgd,
    /// SGD with momentum: one f32 of state for each trained element.
    Momentum,
    /// One f32 of state for each trained element.
    Lion,
    /// One f32 for each row and each column of the trained matrices.
    Adafactor,
    /// `AdamW` with two bytes of state for each trained element, and two f32 for each block of 256.
    Adamw8bit,
    /// Muon for matrices other than embeddings and heads, `AdamW` for all others.
    Muon,
}

/// Parts of the names of embeddings and heads, which Muon leaves to `AdamW`.
const TABLES: [&str; 4] = ["embed", "wte", "wpe", "lm_head"];

impl Optimizer {
    /// Returns the name on a command line.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("no optimizer is hidden");
        value.get_name().to_owned()
    }

    /// Returns whether it updates a model on a device there. The others need its state on the host.
    pub(crate) const fn updates_on_device(self) -> bool {
        !matches!(self, Self::Adafactor | Self::Adamw8bit)
    }

    /// Returns the model with the state of this optimizer. 8-bit state cuts parameters only between
    /// blocks.
    pub(crate) fn applied_to(self, spec: &ModelSpec) -> ModelSpec {
        let spec = match self {
            Self::Adamw8bit => spec.clone().in_blocks(EIGHT_BIT_BLOCK),
            _ => spec.clone(),
        };
        spec.updated_by(|param| self.state(param))
    }

    fn state(self, param: &Param) -> State {
        match self {
            Self::Sgd => State::Elements(0),
            Self::Momentum | Self::Lion => State::Elements(1),
            Self::Adafactor => State::Factored,
            Self::Adamw8bit => State::EightBit { block: EIGHT_BIT_BLOCK },
            Self::Muon if is_updated_whole(param) => State::Muon,
            Self::Adamw | Self::Muon => State::Elements(2),
        }
    }
}

fn is_updated_whole(param: &Param) -> bool {
    let is_table = TABLES.iter().any(|table| param.name.contains(table));
    param.as_matrices().is_some() && !is_table
}
