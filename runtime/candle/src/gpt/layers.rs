//! The layers of a GPT. Norms, softmax and the loss compute in f32, whatever the parameters are.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::sigmoid;

use crate::model::Parameters;

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
    let weight = p.get(&format!("{name}.weight"))?.to_dtype(DType::F32)?;
    let bias = p.get(&format!("{name}.bias"))?.to_dtype(DType::F32)?;
    let wide = x.to_dtype(DType::F32)?;
    let centred = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let normed = centred.broadcast_div(&(variance + LAYER_NORM_EPS)?.sqrt()?)?;
    normed.broadcast_mul(&weight)?.broadcast_add(&bias)?.to_dtype(x.dtype())
}

/// GELU in its tanh form, `x (1 + tanh z) / 2`.
pub(super) fn gelu(x: &Tensor) -> Result<Tensor> {
    // (1 + tanh z) / 2 is the sigmoid of 2 z, which takes candle an eighth of the time.
    let scale = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    let wide = x.to_dtype(DType::F32)?;
    let twice_z = (&wide * wide.sqr()?.affine(0.044715 * scale, scale)?)?;
    (wide * sigmoid(&twice_z)?)?.to_dtype(x.dtype())
}

/// `[length, length]`, 0 where a position may attend and minus infinity where it may not.
pub(super) fn causal_mask(length: usize, device: &Device) -> Result<Tensor> {
    let looks_ahead = |index: usize| index % length > index / length;
    let mask: Vec<f32> = (0..length * length)
        .map(|index| if looks_ahead(index) { f32::NEG_INFINITY } else { 0.0 })
        .collect();
    Tensor::from_vec(mask, (length, length), device)
}

/// Causal self-attention of `qkv`, `[batch, length, 3 * width]`, to `[batch, length, width]`.
pub(super) fn attention(qkv: &Tensor, heads: usize, mask: &Tensor) -> Result<Tensor> {
    let (batch, length, _) = qkv.dims3()?;
    let split = qkv.reshape((batch, length, 3, heads, ()))?.permute((2, 0, 3, 1, 4))?;
    // [batch * heads, length, head width]: one matmul a head.
    let part = |index: usize| split.get(index)?.flatten_to(1)?.contiguous();
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    #[expect(clippy::cast_precision_loss, reason = "a head's width is small")]
    let scale = 1.0 / (q.dim(2)? as f64).sqrt();
    let scores = (q.matmul(&k.t()?)?.to_dtype(DType::F32)? * scale)?.broadcast_add(mask)?;
    let mixed = softmax(&scores)?.to_dtype(v.dtype())?.matmul(&v)?;
    let by_position = mixed.reshape((batch, heads, length, ()))?.transpose(1, 2)?;
    by_position.contiguous()?.flatten_from(2)
}

/// Softmax over the last dim.
fn softmax(x: &Tensor) -> Result<Tensor> {
    // The maximum only keeps exp in range: the result, and so the gradient, does not depend on it.
    let shifted = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?;
    let exponentials = shifted.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

/// The mean over rows of `-log softmax(logits)[target]`.
pub(super) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(D::Minus1)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let chosen = shifted.gather(&targets.unsqueeze(1)?, 1)?;
    (log_sum - chosen)?.mean_all()
}
