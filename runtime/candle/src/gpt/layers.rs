//! The layers of a GPT that have parameters, and attention. Norms, softmax and the loss compute in f32, whatever the parameters are.

use candle_core::{Result, Tensor};

use crate::model::Parameters;
use crate::nn;

const LAYER_NORM_EPS: f64 = 1e-5;

/// `x W^T + b` on the last dim of `x`.
pub(super) fn linear(p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
    let weight = p.get(&format!("{name}.weight"))?;
    let bias = p.get(&format!("{name}.bias"))?;
    let mut dims = x.dims().to_vec();
    let rows = x.reshape(((), weight.dim(1)?))?;
    let output = rows.matmul(&weight.t()?)?.broadcast_add(&bias)?;
    if let Some(last) = dims.last_mut() {
        *last = weight.dim(0)?;
    }
    output.reshape(dims)
}

/// Normalizes the last dim of `x` to mean 0 and variance 1, then scales and shifts it.
pub(super) fn layer_norm(p: &dyn Parameters, name: &str, x: &Tensor) -> Result<Tensor> {
    let weight = p.get(&format!("{name}.weight"))?;
    let bias = p.get(&format!("{name}.bias"))?;
    nn::layer_norm(x, &weight, &bias, LAYER_NORM_EPS)
}

/// Causal self-attention of `qkv`, `[batch, length, 3 * width]`, to `[batch, length, width]`.
pub(super) fn attention(qkv: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, length, _) = qkv.dims3()?;
    let split = qkv.reshape((batch, length, 3, heads, ()))?.permute((2, 0, 3, 1, 4))?;
    // [batch * heads, length, head width]: one matmul a head.
    let part = |index: usize| split.get(index)?.flatten_to(1)?.contiguous();
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    #[expect(clippy::cast_precision_loss, reason = "a head's width is small")]
    let scale = 1.0 / (q.dim(2)? as f64).sqrt();
    let shares = nn::softmax_of_scores(&q.matmul(&k.t()?)?, scale, nn::Mask::Causal)?;
    let by_position = shares.matmul(&v)?.reshape((batch, heads, length, ()))?.transpose(1, 2)?;
    by_position.contiguous()?.flatten_from(2)
}
