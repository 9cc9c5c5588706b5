//! Attention and the layers of a GPT that have parameters. Norms, softmax and the loss compute in
//! f32 for all dtypes of parameters.

use candle_core::{Result, Tensor};

use crate::nn::{self, Mask, Scores};
use hsdp_candle::Parameters;

const LAYER_NORM_EPS: f64 = 1e-5;

/// Computes `x W^T + b` on the last dim of `x`.
pub(super) fn linear(p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
    let weight = p.get(&format!("{name}.weight"))?;
    let bias = p.get(&format!("{name}.bias"))?;
    nn::linear(x, &weight, Some(&bias))
}

/// Normalizes the last dim of `x` to mean 0 and variance 1, then scales and shifts it.
pub(super) fn layer_norm(p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
    let weight = p.get(&format!("{name}.weight"))?;
    let bias = p.get(&format!("{name}.bias"))?;
    nn::layer_norm(x, &weight, &bias, LAYER_NORM_EPS)
}

/// Maps `qkv`, `[batch, length, 3 * width]`, to `[batch, length, width]` by causal self-attention.
pub(super) fn attention(qkv: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, length, _) = qkv.dims3()?;
    let qkv = qkv.reshape((batch, length, 3, heads, ()))?;
    #[expect(clippy::cast_precision_loss, reason = "a head's width is small")]
    let scale = 1.0 / (qkv.dim(4)? as f64).sqrt();
    let scores = Scores { scale, cap: None, mask: Mask::Causal };
    nn::attention_packed(&qkv, &scores)?.flatten_from(2)
}
