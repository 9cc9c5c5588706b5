//! The layers of [`nn`](super), composed of candle's own ops, for tensors that are not on the CPU
//! and for comparison.
//!
//! Each function computes what its namesake in [`nn`](super) computes, with the same arguments, in
//! f32 with one rounding at the end. Only products of matrices are computed in the dtype of their
//! input. These functions take more time and memory, because each op reads and writes whole tensors
//! and keeps them for the backward: a window saves none of it. They do not check their arguments:
//! errors come from the candle op that refused them.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Tensor};
use candle_nn::ops::sigmoid;
use hsdp_candle::{BatchStatistics, ForwardMode, Parameters};

use super::batch_norm::{BatchMoments, BatchNormOptions, BatchNormTensors, check_channels};
use super::cross_entropy::{CrossEntropy, targets};
use super::embedding::with_width;
use super::{Mask, Scores};

/// Computes [`linear`](super::linear()), but entirely in the dtype of `x`.
///
/// # Errors
/// The errors of candle.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut dims = x.dims().to_vec();
    dims.pop();
    dims.push(weight.dim(0)?);
    let y = x.reshape(((), weight.dim(1)?))?.matmul(&weight.to_dtype(x.dtype())?.t()?)?;
    let y = match bias {
        Some(bias) => y.broadcast_add(&bias.to_dtype(x.dtype())?)?,
        None => y,
    };
    y.reshape(dims)
}

/// Computes [`embedding`](super::embedding()) without a check of the ids. The gradient of a 16-bit
/// weight needs a copy of it in f32.
///
/// # Errors
/// The errors of candle.
pub fn embedding(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let read = if weight.track_op() { weight.to_dtype(DType::F32)? } else { weight.clone() };
    let rows = read.index_select(&ids.flatten_all()?, 0)?;
    rows.reshape(with_width(ids, weight)?)?.to_dtype(weight.dtype())
}

/// Computes [`padded_embedding`](super::padded_embedding()), without a check of the ids.
///
/// # Errors
/// The errors of candle.
pub fn padded_embedding(ids: &Tensor, weight: &Tensor, padding: usize) -> Result<Tensor> {
    let rows = embedding(ids, weight)?;
    let padding = Tensor::new(padding as i64, ids.device())?;
    let is_real = ids.to_dtype(DType::I64)?.broadcast_ne(&padding)?;
    let is_real = is_real.unsqueeze(ids.rank())?.broadcast_as(rows.shape())?.contiguous()?;
    is_real.where_cond(&rows, &rows.detach())
}

/// Computes [`rms_norm`](super::rms_norm()).
///
/// # Errors
/// The errors of candle.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let wide = x.to_dtype(DType::F32)?;
    let mean_square = wide.sqr()?.mean_keepdim(D::Minus1)?;
    let normed = wide.broadcast_div(&(mean_square + eps)?.sqrt()?)?;
    normed.broadcast_mul(&weight.to_dtype(DType::F32)?)?.to_dtype(x.dtype())
}

/// Computes [`layer_norm`](super::layer_norm()).
///
/// # Errors
/// The errors of candle.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let wide = x.to_dtype(DType::F32)?;
    let centred = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let normed = centred.broadcast_div(&(variance + eps)?.sqrt()?)?;
    let scaled = normed.broadcast_mul(&weight.to_dtype(DType::F32)?)?;
    scaled.broadcast_add(&bias.to_dtype(DType::F32)?)?.to_dtype(x.dtype())
}

/// Computes [`batch_norm`](super::batch_norm()).
///
/// # Errors
/// The errors of [`batch_norm`](super::batch_norm()), and of candle.
pub fn batch_norm(
    parameters: &dyn Parameters,
    name: &str,
    x: &Tensor,
    options: BatchNormOptions,
) -> Result<Tensor> {
    let layer = BatchNormTensors::read(parameters, name, x)?;
    let mut dims = vec![1; x.rank()];
    dims[1] = x.dim(1)?;
    let aligned = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.reshape(dims.as_slice());
    let wide = x.to_dtype(DType::F32)?;
    let (mean, variance) = match parameters.mode()? {
        ForwardMode::Training => moments_of_batch(parameters, name, &wide, &layer, options)?,
        ForwardMode::Evaluation => {
            let running = |what| -> Result<Tensor> {
                let name = format!("{name}.{what}");
                let buffer = parameters.buffer(&name)?;
                check_channels(x, &name, &buffer)?;
                Ok(buffer)
            };
            (running("running_mean")?, running("running_var")?)
        }
    };
    let deviation = (aligned(&variance)? + options.eps)?.sqrt()?;
    let normed = wide.broadcast_sub(&aligned(&mean)?)?.broadcast_div(&deviation)?;
    let scaled = normed.broadcast_mul(&aligned(&layer.weight)?)?;
    scaled.broadcast_add(&aligned(&layer.bias)?)?.to_dtype(x.dtype())
}

/// Returns mean and variance of each channel of the batch, whose gradients flow to the batches of
/// all ranks, and moves the running statistics.
fn moments_of_batch(
    parameters: &dyn Parameters,
    name: &str,
    x: &Tensor,
    layer: &BatchNormTensors,
    options: BatchNormOptions,
) -> Result<(Tensor, Tensor)> {
    let wide = x.transpose(0, 1)?.flatten_from(1)?.to_dtype(DType::F64)?;
    let (channels, own_count) = wide.dims2()?;
    let own = Tensor::cat(&[wide.sum(1)?, wide.sqr()?.sum(1)?], 0)?.to_device(&Device::Cpu)?;
    let values = own.detach().to_vec1::<f64>()?.into_iter();
    let sums = layer.statistics.forward([own_count as f64].into_iter().chain(values).collect())?;
    let moments = BatchMoments::of(&sums)?;
    layer.follow(parameters, name, &moments, options)?;
    let statistics = Arc::clone(&layer.statistics);
    let sums = own.apply_op1(SumOfStatistics { sums: sums[1..].to_vec(), statistics })?;
    if sums.track_op() {
        layer.statistics.await_backward(x);
    }
    let means = (sums.to_device(x.device())? / moments.count)?;
    let (mean, square) = (means.narrow(0, 0, channels)?, means.narrow(0, channels, channels)?);
    let variance = (square - mean.sqr()?)?;
    // Rounding may leave it below 0: the value is that of the moments, which is not.
    let rounded = (Tensor::new(moments.variances, x.device())? - variance.detach())?;
    Ok((mean, (variance + rounded)?))
}

/// Op on a rank's statistics, whose output is their sums over all ranks.
struct SumOfStatistics {
    sums: Vec<f64>,
    statistics: Arc<BatchStatistics>,
}

impl CustomOp1 for SumOfStatistics {
    fn name(&self) -> &'static str {
        "sum of statistics"
    }

    fn cpu_fwd(&self, _: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F64(self.sums.clone()), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let sums = self.statistics.backward(gradient.to_vec1()?)?;
        Ok(Some(Tensor::new(sums, &Device::Cpu)?))
    }
}

/// Computes [`softmax_of_scores`](super::softmax_of_scores).
///
/// # Errors
/// The errors of candle.
pub fn softmax_of_scores(products: &Tensor, scores: &Scores<'_>) -> Result<Tensor> {
    let scaled = (products.to_dtype(DType::F32)? * scores.scale)?;
    let wide = match scores.cap {
        Some(cap) => soft_cap(&scaled, cap)?,
        None => scaled,
    };
    let masked = match scores.mask {
        Mask::None => wide,
        Mask::Causal => wide.broadcast_add(&causal_mask(products, usize::MAX)?)?,
        Mask::Window(window) => wide.broadcast_add(&causal_mask(products, window)?)?,
        Mask::Additive(mask) => wide.broadcast_add(&mask.to_dtype(DType::F32)?)?,
    };
    // The maximum only keeps exp in range: the result, and so the gradient, does not depend on it.
    let shifted = masked.broadcast_sub(&masked.detach().max_keepdim(D::Minus1)?)?;
    let exponentials = shifted.exp()?;
    let shares = exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)?;
    shares.to_dtype(products.dtype())
}

/// Computes [`attention`](super::attention()), with products in the dtype of `q`. In f16 a power of
/// two of the scale moves into `q`, so that scores do not overflow before they are scaled.
///
/// # Errors
/// The errors of candle.
pub fn attention([q, k, v]: [&Tensor; 3], scores: &Scores<'_>) -> Result<Tensor> {
    let (batch, queries, heads, dim) = q.dims4()?;
    let keys = k.dim(1)?;
    let groups = k.dim(2)?;
    let by_head = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    // One product takes the heads of a group, one below the other, so keys and values are not
    // repeated.
    let grouped = |x: &Tensor| by_head(x)?.reshape((batch * groups, (), dim));
    let (q, scale) = match q.dtype() {
        DType::F16 => {
            let power = power_of_two(scores.scale);
            ((q * power)?, scores.scale / power)
        }
        _ => (q.clone(), scores.scale),
    };
    let q = grouped(&q)?;
    let k = grouped(k)?;
    let v = grouped(v)?;
    let products = q.matmul(&k.t()?)?.reshape((batch, heads, queries, keys))?;
    let scores = Scores { scale, ..*scores };
    let shares = match scores.mask {
        Mask::Additive(mask) => shares_or_zeros(&products, &scores, mask)?,
        _ => softmax_of_scores(&products, &scores)?,
    };
    let shares = shares.reshape((batch * groups, (), keys))?;
    by_head(&shares.matmul(&v)?.reshape((batch, heads, queries, dim))?)
}

/// Returns the largest power of two below the magnitude of a scale, from 2^-8 to 1.
fn power_of_two(scale: f64) -> f64 {
    scale.abs().log2().floor().exp2().clamp(1.0 / 256.0, 1.0)
}

/// Computes the shares, and replaces them with 0 in rows without a visible key.
fn shares_or_zeros(products: &Tensor, scores: &Scores<'_>, mask: &Tensor) -> Result<Tensor> {
    let is_empty = mask.max_keepdim(D::Minus1)?.eq(f64::NEG_INFINITY)?;
    let all = is_empty.broadcast_as(mask.shape())?;
    // Such a row gets a finite mask, because the gradient of a NaN share would not be 0.
    let mask = all.where_cond(&mask.zeros_like()?, mask)?;
    let shares = softmax_of_scores(products, &Scores { mask: Mask::Additive(&mask), ..*scores })?;
    let shown = is_empty.eq(0_u8)?.to_dtype(shares.dtype())?;
    shares.broadcast_mul(&shown)
}

/// Computes [`attention_packed`](super::attention_packed()) through [`attention`].
///
/// # Errors
/// The errors of candle.
pub fn attention_packed(qkv: &Tensor, scores: &Scores<'_>) -> Result<Tensor> {
    let part = |index| qkv.narrow(2, index, 1)?.squeeze(2);
    attention([&part(0)?, &part(1)?, &part(2)?], scores)
}

/// Returns a mask `[queries, keys]`, 0 where a query may attend and minus infinity where it may
/// not.
fn causal_mask(scores: &Tensor, window: usize) -> Result<Tensor> {
    let queries = scores.dim(D::Minus2)?;
    let keys = scores.dim(D::Minus1)?;
    let is_visible = |index: usize| {
        let end = index / keys + keys - queries + 1;
        let key = index % keys;
        (end.saturating_sub(window)..end).contains(&key)
    };
    let mask: Vec<f32> = (0..queries * keys)
        .map(|index| if is_visible(index) { 0.0 } else { f32::NEG_INFINITY })
        .collect();
    Tensor::from_vec(mask, (queries, keys), &Device::Cpu)?.to_device(scores.device())
}

/// Computes [`soft_cap`](super::soft_cap()).
///
/// # Errors
/// The errors of candle.
pub fn soft_cap(x: &Tensor, cap: f64) -> Result<Tensor> {
    ((x.to_dtype(DType::F32)? / cap)?.tanh()? * cap)?.to_dtype(x.dtype())
}

/// Computes [`rope`](super::rope()).
///
/// # Errors
/// The errors of candle.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let pairs = cos.dim(1)?;
    let wide = x.to_dtype(DType::F32)?;
    let halves = [wide.narrow(D::Minus1, 0, pairs)?, wide.narrow(D::Minus1, pairs, pairs)?];
    let [first, second] = rotated(halves, [cos, sin])?;
    with_rest(&Tensor::cat(&[first, second], D::Minus1)?, x)
}

/// Computes [`rope_interleaved`](super::rope_interleaved).
///
/// # Errors
/// The errors of candle.
pub fn rope_interleaved(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let pairs = cos.dim(1)?;
    let mut dims = x.dims().to_vec();
    dims.pop();
    dims.extend([pairs, 2]);
    let wide = x.narrow(D::Minus1, 0, 2 * pairs)?.to_dtype(DType::F32)?.reshape(dims)?;
    let part = |index| wide.narrow(D::Minus1, index, 1)?.squeeze(D::Minus1);
    let [first, second] = rotated([part(0)?, part(1)?], [cos, sin])?;
    with_rest(&Tensor::stack(&[first, second], D::Minus1)?.flatten_from(D::Minus2)?, x)
}

/// Appends the elements of `x` that were not rotated.
fn with_rest(rotated: &Tensor, x: &Tensor) -> Result<Tensor> {
    let start = rotated.dim(D::Minus1)?;
    let rotated = rotated.to_dtype(x.dtype())?;
    match x.dim(D::Minus1)? - start {
        0 => Ok(rotated),
        rest => Tensor::cat(&[rotated, x.narrow(D::Minus1, start, rest)?], D::Minus1),
    }
}

/// Rotates the first and the second elements of pairs.
fn rotated([first, second]: [Tensor; 2], [cos, sin]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
    let length = first.dim(first.rank() - 3)?;
    let table = |table: &Tensor| table.narrow(0, 0, length)?.unsqueeze(1)?.to_dtype(DType::F32);
    let cos = table(cos)?;
    let sin = table(sin)?;
    let turned = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
    Ok([turned, (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?])
}

/// Computes [`cross_entropy`](super::cross_entropy()).
///
/// # Errors
/// The errors of candle, and those of labels.
pub fn cross_entropy(logits: &Tensor, labels: &Tensor, ignored: i64) -> Result<CrossEntropy> {
    let targets = targets(logits, labels, ignored)?;
    let classes = logits.dim(D::Minus1)?;
    let counting: Vec<u32> =
        (0..).zip(&targets).filter(|(_, target)| target.is_some()).map(|(item, _)| item).collect();
    let labels: Vec<i64> = targets.into_iter().flatten().map(|target| target as i64).collect();
    let count = labels.len();
    if count == 0 {
        return Ok(CrossEntropy { sum: none(logits)?, count: 0 });
    }
    let counting = Tensor::from_vec(counting, count, logits.device())?;
    let labels = Tensor::from_vec(labels, (count, 1), logits.device())?;
    let wide = logits.reshape(((), classes))?.index_select(&counting, 0)?.to_dtype(DType::F32)?;
    let shifted = wide.broadcast_sub(&wide.detach().max_keepdim(D::Minus1)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let sum = (log_sum - shifted.gather(&labels, 1)?)?.sum_all()?;
    Ok(CrossEntropy { sum, count: count as u64 })
}

/// Returns the sum over no items. It depends on the logits, so that a backward reaches them.
fn none(logits: &Tensor) -> Result<Tensor> {
    logits.flatten_all()?.narrow(0, 0, 0)?.to_dtype(DType::F32)?.sum_all()
}

/// Computes [`gelu`](super::gelu()).
///
/// # Errors
/// The errors of candle.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    wide_gelu(x)?.to_dtype(x.dtype())
}

fn wide_gelu(x: &Tensor) -> Result<Tensor> {
    // (1 + tanh z) / 2 is the sigmoid of 2 z, which takes candle an eighth of the time.
    let scale = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    let wide = x.to_dtype(DType::F32)?;
    let twice_z = (&wide * wide.sqr()?.affine(0.044715 * scale, scale)?)?;
    wide * sigmoid(&twice_z)?
}

/// Computes [`gelu_mul`](super::gelu_mul).
///
/// # Errors
/// The errors of candle.
pub fn gelu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    (wide_gelu(gate)? * up.to_dtype(DType::F32)?)?.to_dtype(gate.dtype())
}

/// Computes [`silu_mul`](super::silu_mul).
///
/// # Errors
/// The errors of candle.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let wide = gate.to_dtype(DType::F32)?;
    ((&wide * sigmoid(&wide)?)? * up.to_dtype(DType::F32)?)?.to_dtype(gate.dtype())
}
