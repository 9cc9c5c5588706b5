//! A GPT in ordinary candle code. The example trains it, and the conformance cases check it.
//!
//! The model has pre-norm residual blocks, learned positions, causal attention, GELU in its tanh
//! form and no tied weights. A linear weight is `[out, in]`. The rows of `attn.qkv` are q, then k,
//! then v, each with its heads one after the other. The units `h.0`, `h.1`, ... are the blocks. The
//! unit `root` has all other parameters. The forward uses it at both ends, so it is kept in
//! between.
//!
//! No code here copies a weight, so no copy of a unit's parameters outlives the unit.

use candle_core::{Device, IndexOp, Result, Tensor, bail};
use hsdp_candle::{Parameters, Units, UnitsExt};
use hsdp_sharding::{DType, ModelSpec, Param, Unit};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::nn::{self, Mask, Scores};

/// Name of the unit with the parameters outside of blocks.
const ROOT: &str = "root";

const LAYER_NORM_EPS: f64 = 1e-5;

/// Standard deviation of initial weights, as in GPT-2.
const WEIGHT_STD: f32 = 0.02;

/// The sizes of a GPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptConfig {
    /// Number of different tokens.
    pub vocab: usize,
    /// Length of the longest sequence, in tokens.
    pub context: usize,
    /// Number of elements in the residual stream.
    pub width: usize,
    /// Number of attention heads in a block. It divides the width.
    pub heads: usize,
    /// Number of blocks.
    pub layers: usize,
}

/// Error of sizes that make no GPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GptConfigError {
    /// A size is 0.
    #[error("{size} is 0: the least is 1")]
    Zero {
        /// Name of the size.
        size: &'static str,
    },
    /// A size is above [`GptConfig::MAX_SIZE`] or [`GptConfig::MAX_LAYERS`].
    #[error("{size} is {count}: the most is {most}")]
    TooLarge {
        /// Name of the size.
        size: &'static str,
        /// Value of the size.
        count: usize,
        /// Largest allowed value.
        most: usize,
    },
    /// The heads do not divide the width.
    #[error("width {width} is not divisible by {heads} heads")]
    Heads {
        /// Width of the residual stream.
        width: usize,
        /// Number of heads.
        heads: usize,
    },
}

impl GptConfig {
    /// Maximum `vocab`, `context`, `width` and `heads`, 2^24. The elements of a block of such sizes
    /// fit 64 bits.
    pub const MAX_SIZE: usize = 1 << 24;

    /// Maximum number of blocks. A description of more would take long to plan.
    pub const MAX_LAYERS: usize = 10_000;

    fn check(&self) -> std::result::Result<(), GptConfigError> {
        let sizes = [
            ("vocab", self.vocab, Self::MAX_SIZE),
            ("context", self.context, Self::MAX_SIZE),
            ("width", self.width, Self::MAX_SIZE),
            ("heads", self.heads, Self::MAX_SIZE),
            ("layers", self.layers, Self::MAX_LAYERS),
        ];
        for (size, count, most) in sizes {
            match count {
                0 => return Err(GptConfigError::Zero { size }),
                count if count > most => {
                    return Err(GptConfigError::TooLarge { size, count, most });
                }
                _ => {}
            }
        }
        if !self.width.is_multiple_of(self.heads) {
            return Err(GptConfigError::Heads { width: self.width, heads: self.heads });
        }
        Ok(())
    }

    /// Returns the model's parameters: the unit `root`, then one unit for each block, in the order
    /// of the forward.
    #[must_use]
    pub fn spec(&self) -> ModelSpec {
        let spec = ModelSpec::new().setting("heads", self.heads).unit(self.root());
        (0..self.layers).fold(spec, |spec, layer| spec.unit(self.block(layer)))
    }

    fn root(&self) -> Unit {
        let Self { vocab, context, width, .. } = *self;
        Unit::new(ROOT)
            .param(Param::new("wte.weight", [vocab, width]))
            .param(Param::new("wpe.weight", [context, width]))
            .param(Param::new("ln_f.weight", [width]))
            .param(Param::new("ln_f.bias", [width]))
            .param(Param::new("lm_head.weight", [vocab, width]))
            .keep()
    }

    fn block(&self, layer: usize) -> Unit {
        let width = self.width;
        let name = format!("h.{layer}");
        let norm = |unit: Unit, norm: &str| {
            unit.param(Param::new(format!("{name}.{norm}.weight"), [width]))
                .param(Param::new(format!("{name}.{norm}.bias"), [width]))
        };
        let linear = |unit: Unit, linear: &str, rows: usize, columns: usize| {
            unit.param(Param::new(format!("{name}.{linear}.weight"), [rows, columns]))
                .param(Param::new(format!("{name}.{linear}.bias"), [rows]))
        };
        let unit = norm(Unit::new(&name), "ln_1");
        let unit = linear(unit, "attn.qkv", 3 * width, width);
        let unit = linear(unit, "attn.proj", width, width);
        let unit = norm(unit, "ln_2");
        let unit = linear(unit, "mlp.fc", 4 * width, width);
        linear(unit, "mlp.proj", width, 4 * width)
    }
}

/// Sizes and forward of a GPT. The [`Units`] that run it provide the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpt {
    config: GptConfig,
}

impl Gpt {
    /// Creates a GPT of these sizes.
    ///
    /// # Errors
    /// [`GptConfigError`], if a size is 0 or too large, or the heads do not divide the width.
    pub fn new(config: GptConfig) -> std::result::Result<Self, GptConfigError> {
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
    /// [`UnitsExt::unit`] is.
    ///
    /// # Errors
    /// If `length` is above the context, a token is not below `vocab`, or a unit cannot be run.
    pub fn logits(&self, units: &dyn Units, tokens: &Tensor) -> Result<Tensor> {
        let mut x = units.unit(ROOT, tokens, |p, tokens| embed(p, tokens))?;
        for layer in 0..self.config.layers {
            let name = format!("h.{layer}");
            x = units.unit(&name, &x, |p, x| self.block(p, &name, x))?;
        }
        units.output(&units.unit(ROOT, &x, |p, x| head(p, x))?)
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
        let normed = layer_norm(p, &format!("{name}.ln_1"), x)?;
        let qkv = linear(p, &format!("{name}.attn.qkv"), &normed)?;
        let attended = attention(&qkv, self.config.heads)?;
        let x = nn::add(x, &linear(p, &format!("{name}.attn.proj"), &attended)?)?;
        let normed = layer_norm(p, &format!("{name}.ln_2"), &x)?;
        let hidden = nn::gelu(&linear(p, &format!("{name}.mlp.fc"), &normed)?)?;
        nn::add(&x, &linear(p, &format!("{name}.mlp.proj"), &hidden)?)
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
    let tokens = nn::embedding(tokens, &p.get("wte.weight")?)?;
    nn::add(&tokens, &nn::embedding(&places, &p.get("wpe.weight")?)?)
}

/// Maps `[batch, length, width]` to logits `[batch * length, vocab]`.
fn head(p: &dyn Parameters, x: &Tensor) -> Result<Tensor> {
    let normed = layer_norm(p, "ln_f", x)?.flatten_to(1)?;
    nn::linear(&normed, &p.get("lm_head.weight")?, None)
}

/// Computes `x W^T + b` on the last dim of `x`.
fn linear(p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
    let weight = p.get(&format!("{name}.weight"))?;
    let bias = p.get(&format!("{name}.bias"))?;
    nn::linear(x, &weight, Some(&bias))
}

/// Normalizes the last dim of `x` to mean 0 and variance 1, then scales and shifts it.
fn layer_norm(p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
    let weight = p.get(&format!("{name}.weight"))?;
    let bias = p.get(&format!("{name}.bias"))?;
    nn::layer_norm(x, &weight, &bias, LAYER_NORM_EPS)
}

/// Maps `qkv`, `[batch, length, 3 * width]`, to `[batch, length, width]` by causal self-attention.
fn attention(qkv: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, length, _) = qkv.dims3()?;
    let qkv = qkv.reshape((batch, length, 3, heads, ()))?;
    #[expect(clippy::cast_precision_loss, reason = "a head's width is small")]
    let scale = 1.0 / (qkv.dim(4)? as f64).sqrt();
    let scores = Scores { scale, cap: None, mask: Mask::Causal };
    nn::attention_packed(&qkv, &scores)?.flatten_from(2)
}

/// Sizes of the tensors that a block keeps, in widths of the residual stream: each norm 1,
/// `attn.qkv` 3, attention 1, each projection 1, `mlp.fc` 4, GELU 4, and each residual sum 1.
const WIDTHS: usize = 18;

/// Sizes of the tensors outside of the blocks: the embeddings, their sum, and the last norm.
const WIDTHS_OF_ENDS: usize = 3;

/// Maximum sizes of gradients during the backward of a block: GELU has those of its output and of
/// its input, 4 each, beside that of the residual stream.
const GRADIENT_WIDTHS: usize = 9;

/// Sizes of tensors while an attention has scores: gradients of the residual stream 1, of its output
/// 1, of queries, keys and values 3, and copies of the heads in work, about 1.
const SCORES_WIDTHS: usize = 6;

/// Number of gradients of the logits.
const GRADIENT_LOGITS: usize = 1;

/// Bytes of the tensors that one microbatch needs on one rank: tensors that the forward keeps for
/// the backward, and gradients that the backward holds. Small tensors are left out. A number beyond
/// `u64::MAX` counts as `u64::MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptMemory {
    /// Bytes that the layers keep.
    pub activations: u64,
    /// Bytes that the loss keeps.
    pub logits: u64,
    /// Maximum bytes that the backward holds besides: gradients of one block's tensors, or of the
    /// logits. With 16-bit parameters this is a lower bound, because linear layers and attention
    /// convert factors of products.
    pub gradients: u64,
}

impl GptMemory {
    /// Returns each part with its name, for a sum or a table.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, u64); 3] {
        let Self { activations, logits, gradients } = *self;
        [("activations", activations), ("logits", logits), ("the backward of a block", gradients)]
    }
}

impl Gpt {
    /// Returns the memory of a microbatch of `batch` sequences as long as the context, with
    /// parameters in `compute`, if candle computes on the CPU. On a GPU the layers take more.
    #[must_use]
    pub fn kept(&self, batch: usize, compute: DType) -> GptMemory {
        let GptConfig { vocab, context, width, heads, layers } = self.config;
        let bytes = compute.size_bytes();
        let widths = |count, bytes| product([count, batch, context, width, bytes]);
        let logits = |count, bytes| product([count, batch, context, vocab, bytes]);
        let room = room_of_scores(context, batch.saturating_mul(heads));
        let wide = size_of::<f32>(); // gradients of layers are in f32
        let of_attention = widths(SCORES_WIDTHS, wide).saturating_add(room);
        let of_block = widths(GRADIENT_WIDTHS, wide).max(of_attention);
        GptMemory {
            activations: widths(WIDTHS, bytes)
                .saturating_mul(layers as u64)
                .saturating_add(widths(WIDTHS_OF_ENDS, bytes)),
            gradients: of_block.max(logits(GRADIENT_LOGITS, wide)),
            logits: logits(1, bytes),
        }
    }
}

/// Returns the bytes of the scores and their gradients that attention computes at one time.
fn room_of_scores(context: usize, all: usize) -> u64 {
    let at_once = rayon::current_num_threads().min(all);
    product([2, at_once, context, nn::BLOCK.min(context), size_of::<f32>()])
}

fn product(factors: impl IntoIterator<Item = usize>) -> u64 {
    factors.into_iter().fold(1, |product: u64, factor| product.saturating_mul(factor as u64))
}

/// Returns the initial values of a parameter, row-major, for
/// [`ShardedModel::new`](hsdp::ShardedModel::new).
///
/// Matrices are normal with deviation 0.02, norms begin as the identity, biases at 0.
#[must_use]
pub fn init(param: &Param, seed: u64) -> Vec<f32> {
    match param.shape.len() {
        1 if param.name.ends_with(".weight") => vec![1.0; param.numel()],
        1 => vec![0.0; param.numel()],
        _ => normal(param, seed),
    }
}

fn normal(param: &Param, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(xxh3_64_with_seed(param.name.as_bytes(), seed));
    (0..param.numel()).map(|_| WEIGHT_STD * standard_normal(&mut rng)).collect()
}

/// Draws a number by the Box-Muller transform. One half of its pair is enough here.
fn standard_normal(rng: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}

/// Returns `prompt` (which must not be empty) followed by `draw.count` drawn tokens.
///
/// # Errors
/// The errors of [`Gpt::logits`].
pub fn sample(gpt: &Gpt, units: &dyn Units, prompt: &[u32], draw: Draw) -> Result<Vec<u32>> {
    let mut rng = ChaCha8Rng::seed_from_u64(draw.seed);
    let mut tokens = prompt.to_vec();
    for _ in 0..draw.count {
        let window = &tokens[tokens.len().saturating_sub(gpt.config().context)..];
        let input = Tensor::new(window, &Device::Cpu)?.unsqueeze(0)?;
        let logits = gpt.logits(units, &input)?;
        let last =
            logits.i(window.len() - 1)?.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()?;
        tokens.push(pick(&last, draw.temperature, rng.random()));
    }
    Ok(tokens)
}

/// Options of [`sample`].
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// Number of tokens to draw.
    pub count: usize,
    /// Divisor of the logits. Below 1 it makes likely tokens likelier, above 1 unlikely ones. At 0
    /// each token is the likeliest.
    pub temperature: f32,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Returns the token at which the cumulative probability passes `point`, which is in `0..1`.
/// Returns the likeliest if the probability never passes it, because sums were rounded or the
/// temperature is 0.
fn pick(logits: &[f32], temperature: f32, point: f32) -> u32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights = logits.iter().map(|logit| ((logit - largest) / temperature).exp());
    let total: f32 = weights.clone().sum();
    let mut left = point * total;
    let passed = weights.zip(0..).find(|(weight, _)| {
        left -= weight;
        left < 0.0
    });
    let likeliest = || logits.iter().zip(0..).find(|(logit, _)| **logit == largest);
    let token = passed.map(|(_, token)| token).or_else(|| likeliest().map(|(_, token)| token));
    token.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::pick;

    #[test]
    fn a_point_picks_the_token_in_whose_part_it_lies() {
        let logits = [0.5_f32.ln(), 0.25_f32.ln(), 0.25_f32.ln()];
        assert_eq!([0.1, 0.49, 0.6, 0.9].map(|point| pick(&logits, 1.0, point)), [0, 0, 1, 2]);
    }

    #[test]
    fn without_temperature_the_likeliest_token_is_picked() {
        assert_eq!([0.0, 0.99].map(|point| pick(&[0.0, 3.0, 1.0], 0.0, point)), [1, 1]);
    }
}
