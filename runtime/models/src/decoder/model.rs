//! The model, which runs unit by unit.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use hsdp_sharding::{ModelSpec, Param};

use super::block::{Block, Embedding, LmHead};
use super::config::DecoderConfig;
use super::layers::{self, Lora, Rotary};
use crate::nn::{self, CrossEntropy};
use hsdp_candle::Error;
use hsdp_candle::var_builder;
use hsdp_candle::{Parameters, Units, UnitsExt};
use hsdp_candle::{Recorded, record};

const EMBED: &str = "model.embed_tokens";
const LAYERS: &str = "model.layers";
const ROOT: &str = "root";

/// Tensors that the backward computes again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recomputation {
    /// The backward computes none: the forward keeps them all.
    #[default]
    Off,
    /// The forward of a block keeps its output alone, and the backward runs each block again
    /// ([`UnitsExt::recomputed`]). Losses and gradients have the same bits.
    Blocks,
}

/// A decoder, without its parameters.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: Arc<DecoderConfig>,
    recomputation: Recomputation,
    /// Dtype of frozen parameters without an f32 master.
    stored: Option<hsdp::DType>,
    /// Names of units that compute in a dtype of their own, with that dtype.
    computing: Vec<(String, hsdp::DType)>,
}

impl Decoder {
    /// Creates a model of these sizes.
    #[must_use]
    pub fn new(config: DecoderConfig) -> Self {
        Self {
            config: Arc::new(config),
            recomputation: Recomputation::Off,
            stored: None,
            computing: Vec::new(),
        }
    }

    /// Sets the recomputation.
    #[must_use]
    pub fn recomputing(self, recomputation: Recomputation) -> Self {
        Self { recomputation, ..self }
    }

    /// Adds trained adapters to the projections of attention, and freezes everything else.
    #[must_use]
    pub fn with_lora(mut self, lora: Lora) -> Self {
        Arc::make_mut(&mut self.config).lora = Some(lora);
        self
    }

    /// [Stores](Param::stored_in) the [frozen](Self::with_lora) parameters in 16 bits alone, in the
    /// dtype of gathered parameters.
    #[must_use]
    pub fn storing_frozen_in(self, dtype: hsdp::DType) -> Self {
        Self { stored: Some(dtype), ..self }
    }

    /// Sets the [compute dtype](Recorded::compute_in) of the unit with this name. For example,
    /// `root`, which has the last norm and the head, may compute in f32 in a bf16 model. A head
    /// that is tied to the embedding needs the dtype of the embedding. [`spec`](Self::spec) fails
    /// if there is no such unit.
    #[must_use]
    pub fn compute_in(mut self, unit: impl Into<String>, dtype: hsdp::DType) -> Self {
        self.computing.push((unit.into(), dtype));
        self
    }

    /// Returns the sizes.
    #[must_use]
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Records the parameters as the constructors ask for them, with their initial values: matrices
    /// are normal with the deviation `initializer_range`, scales of norms are 1, and biases and the
    /// padding row 0, as in transformers.
    ///
    /// # Errors
    /// The errors of [`record`]; the error of [`DecoderConfig::check`], as an error of candle, if a
    /// field of the config was changed to a value that contradicts the others.
    pub fn recorded(&self) -> std::result::Result<Recorded, Error> {
        let recorded = record(|vb| self.load(&vb))?;
        let recorded = match self.config.pad_token_id {
            None => recorded,
            Some(row) => recorded.with_zero_row(&format!("{EMBED}.weight"), row),
        };
        Ok(recorded.map(|param| match self.config.lora {
            Some(_) if !layers::is_adapter(&param.name) => self.frozen(param),
            _ => param,
        }))
    }

    fn frozen(&self, param: Param) -> Param {
        match self.stored {
            Some(dtype) => param.frozen().stored_in(dtype),
            None => param.frozen(),
        }
    }

    /// Groups the parameters into units in the order of the forward, and adds the settings of the
    /// config that no parameter shows.
    ///
    /// # Errors
    /// The errors of [`recorded`](Self::recorded) and of [`Recorded::spec`].
    pub fn spec(&self) -> std::result::Result<ModelSpec, Error> {
        let blocks = format!("{LAYERS}.*");
        let recorded = self.recorded()?;
        // A tied head reads the embedding too, and its backward needs it.
        let forward_only = self.config.lora.is_some() && !self.config.tie_word_embeddings;
        let recorded = if forward_only { recorded.forward_only(EMBED) } else { recorded };
        let computing = self.computing.iter();
        let recorded =
            computing.fold(recorded, |recorded, (unit, dtype)| recorded.compute_in(unit, *dtype));
        Ok(self.config.stated(recorded.spec(&[EMBED, &blocks, ROOT])?))
    }

    fn load(&self, vb: &VarBuilder<'_>) -> Result<()> {
        let config = &self.config;
        config.check().map_err(candle_core::Error::wrap)?;
        Embedding::load(vb, config)?;
        for layer in 0..config.num_hidden_layers {
            Block::load(&vb.pp(format!("{LAYERS}.{layer}")), layer, config)?;
        }
        LmHead::load(vb, config).map(drop)
    }

    /// Computes the logits `[sequences, length, vocabulary]` of the token after each of `tokens`
    /// (u32, `[sequences, length]`). Collective if `units` is a [`Pass`](hsdp_candle::Pass), as
    /// [`UnitsExt::unit`] is.
    ///
    /// # Errors
    /// If `length` is above `max_position_embeddings`, a token is not below `vocab_size`, or a unit
    /// cannot be run.
    pub fn logits(&self, units: &dyn Units, tokens: &Tensor) -> Result<Tensor> {
        let config = &self.config;
        let (_, length) = tokens.dims2()?;
        let rotary = Rotary::new(config, length, tokens.device())?;
        let mut x = units.unit(EMBED, tokens, |p, tokens| {
            Embedding::load(&var_builder(p), config)?.forward(tokens)
        })?;
        for layer in 0..config.num_hidden_layers {
            x = self.block(units, layer, &x, &rotary)?;
        }
        let logits =
            units.unit(ROOT, &x, |p, x| LmHead::load(&var_builder(p), config)?.forward(x))?;
        units.output(&logits)
    }

    fn block(
        &self,
        units: &dyn Units,
        index: usize,
        x: &Tensor,
        rotary: &Rotary,
    ) -> Result<Tensor> {
        let name = format!("{LAYERS}.{index}");
        let config = Arc::clone(&self.config);
        let rotary = rotary.clone();
        let path = name.clone();
        let forward = move |p: &dyn Parameters, x: &Tensor| {
            Block::load(&var_builder(p).pp(&path), index, &config)?.forward(x, &rotary)
        };
        match self.recomputation {
            Recomputation::Off => units.unit(&name, x, forward),
            Recomputation::Blocks => units.recomputed(&name, x, forward),
        }
    }

    /// Computes the cross-entropy of `labels` (i64, shaped as `tokens`, [`nn::IGNORED`] where a
    /// position does not count). They are not shifted: each is the token after its position.
    ///
    /// # Errors
    /// The errors of [`logits`](Self::logits). Also if a label is neither ignored nor below
    /// `vocab_size`.
    pub fn loss(
        &self,
        units: &dyn Units,
        tokens: &Tensor,
        labels: &Tensor,
    ) -> Result<CrossEntropy> {
        let logits = self.logits(units, tokens)?;
        let labels = labels.to_dtype(DType::I64)?;
        nn::cross_entropy(&logits, &labels, nn::IGNORED)
    }
}
