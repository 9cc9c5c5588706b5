//! A GPT in ordinary candle code. The example trains it, and the conformance cases check it.
//!
//! The model has pre-norm residual blocks, learned positions, causal attention, GELU in its tanh
//! form and no tied weights. A linear weight is `[out, in]`. The rows of `attn.qkv` are q, then k,
//! then v, each with its heads one after the other. The units `h.0`, `h.1`, ... are the blocks. The
//! unit `root` has all other parameters. The forward uses it at both ends, so it is kept in
//! between.
//!
//! No code here copies a weight, so no copy of a unit's parameters outlives the unit.

mod config;
mod init;
mod layers;
mod memory;
mod sample;

use candle_core::{Result, Tensor, bail};

pub use self::config::{ConfigError, GptConfig};
pub use self::init::init;
pub use self::memory::Kept;
pub use self::sample::{Draw, sample};
use crate::nn;
use hsdp_candle::{Parameters, Units};

/// Name of the unit with the parameters outside of blocks.
const ROOT: &str = "root";

/// Sizes and forward of a GPT. The [`Units`] that run it provide the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpt {
    config: GptConfig,
}

impl Gpt {
    /// Creates a GPT of these sizes.
    ///
    /// # Errors
    /// [`ConfigError`], if a size is 0 or too large, or the heads do not divide the width.
    pub fn new(config: GptConfig) -> std::result::Result<Self, ConfigError> {
        config.check()?;
        Ok(Self { config })
    }

    /// Returns the sizes.
    #[must_use]
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Computes the logits `[batch * length, vocab]` of the token after each of `tokens` (u32,
    /// `[batch, length]`). Collective if `units` is a [`Pass`](hsdp_candle::Pass), as
    /// [`Units::unit`] is.
    ///
    /// # Errors
    /// If `length` is above the context, a token is not below `vocab`, or a unit cannot be run.
    pub fn logits(&self, units: &dyn Units, tokens: &Tensor) -> Result<Tensor> {
        let mut x = units.unit(ROOT, tokens, &mut |p, tokens| embed(p, tokens))?;
        for layer in 0..self.config.layers {
            let name = format!("h.{layer}");
            x = units.unit(&name, &x, &mut |p, x| self.block(p, &name, x))?;
        }
        units.output(&units.unit(ROOT, &x, &mut |p, x| head(p, x))?)
    }

    /// Computes the mean cross-entropy of `targets` (u32, shaped as `tokens`), an f32 scalar.
    ///
    /// # Errors
    /// The errors of [`logits`](Self::logits).
    pub fn loss(&self, units: &dyn Units, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let logits = self.logits(units, tokens)?;
        nn::cross_entropy(&logits, &targets.flatten_all()?, nn::IGNORED)?.mean()
    }

    fn block(&self, p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
        let normed = layers::layer_norm(p, &format!("{name}.ln_1"), x)?;
        let qkv = layers::linear(p, &format!("{name}.attn.qkv"), &normed)?;
        let attended = layers::attention(&qkv, self.config.heads)?;
        let x = (x + layers::linear(p, &format!("{name}.attn.proj"), &attended)?)?;
        let normed = layers::layer_norm(p, &format!("{name}.ln_2"), &x)?;
        let hidden = nn::gelu(&layers::linear(p, &format!("{name}.mlp.fc"), &normed)?)?;
        x + layers::linear(p, &format!("{name}.mlp.proj"), &hidden)?
    }
}

/// Maps tokens `[batch, length]` to `[batch, length, width]`.
fn embed(p: &dyn Parameters, tokens: &Tensor) -> Result<Tensor> {
    let (batch, length) = tokens.dims2()?;
    let context = p.get("wpe.weight")?.dim(0)?;
    if length > context {
        bail!("a sequence of {length} tokens is longer than the context, {context}");
    }
    let places: Vec<u32> = (0..batch).flat_map(|_| (0..).take(length)).collect();
    let places = Tensor::from_vec(places, (batch, length), tokens.device())?;
    nn::embedding(tokens, &p.get("wte.weight")?)? + nn::embedding(&places, &p.get("wpe.weight")?)?
}

/// Maps `[batch, length, width]` to logits `[batch * length, vocab]`.
fn head(p: &dyn Parameters, x: &Tensor) -> Result<Tensor> {
    let normed = layers::layer_norm(p, "ln_f", x)?.flatten_to(1)?;
    nn::linear(&normed, &p.get("lm_head.weight")?, None)
}
