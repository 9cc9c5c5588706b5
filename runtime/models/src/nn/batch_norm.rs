//! Batch norm, with statistics over all ranks or over the rank's own batch.

use std::sync::Arc;

use candle_core::{CpuStorage, DType, Result, Shape, Tensor, bail};
use hsdp_candle::{BatchStatistics, ForwardMode, Gradient, Parameters};
use hsdp_kernels::Values;

use super::composed;
use super::element::{LayerElement, LayerInput, LentTensor, check_dtypes, narrow, with_element};
use super::layer::{CpuLayer, LayerGradients, apply, output};
use super::rows::Rows;

const BATCH_NORM: &str = "batch_norm";

/// Settings of [`batch_norm`]. The defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNormOptions {
    /// Number that is added to the variance before the square root.
    pub eps: f64,
    /// Part of the new statistics in the running statistics.
    pub momentum: f64,
}

impl Default for BatchNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5, momentum: 0.1 }
    }
}

/// Normalizes each channel of a batch to mean 0 and variance 1, multiplies it by `{name}.weight`
/// and adds `{name}.bias`. Channels are the second dim of `x`, `[items, channels, ..]`.
///
/// In training, mean and variance are those of the batch, and the buffers `{name}.running_mean` and
/// `{name}.running_var` follow them: `(1 - momentum) running + momentum new`, with the unbiased
/// variance. An evaluation normalizes by the buffers.
///
/// If a unit declares the layer by [`Unit::batch_norm`](hsdp_sharding::Unit::batch_norm), the batch
/// is that of all ranks (PyTorch's `SyncBatchNorm`): collective over the world, once in the forward
/// and once in the backward, in each microbatch. If a unit declares the four tensors alone, the
/// batch is the rank's own; the buffers of ranks then differ, so declare them with
/// [`Param::averaged_buffer`](hsdp_sharding::Param::averaged_buffer).
///
/// Arithmetic is in f32, sums in f64. On a GPU this is [`composed::batch_norm`].
///
/// # Errors
/// If `x` has fewer than two dims, a parameter or buffer is missing or has another length than the
/// second dim, a dtype is not f32, bf16 or f16, or the batch has fewer than two values a channel.
/// The errors of [`BatchStatistics::forward`].
pub fn batch_norm(
    parameters: &dyn Parameters,
    name: &str,
    x: &Tensor,
    options: BatchNormOptions,
) -> Result<Tensor> {
    if !x.device().is_cpu() || parameters.mode()? == ForwardMode::Evaluation {
        return composed::batch_norm(parameters, name, x, options);
    }
    let layer = BatchNormTensors::read(parameters, name, x)?;
    let x = x.contiguous()?;
    let shape = ChannelShape::of(&x);
    let own = {
        let lent = LentTensor::of(&x);
        let x = lent.input()?;
        shape.moments(x.values(BATCH_NORM)?)
    };
    let sums = layer.statistics.forward(own)?;
    let moments = BatchMoments::of(&sums)?;
    layer.follow(parameters, name, &moments, options)?;
    let op = BatchNorm {
        shape,
        scales: moments
            .variances
            .iter()
            .map(|it| narrow(1.0 / (it + options.eps).sqrt()))
            .collect(),
        means: moments.means.iter().copied().map(narrow).collect(),
        count: moments.count,
        statistics: layer.statistics.clone(),
    };
    let y = apply(op, [&x, &layer.weight, &layer.bias])?;
    if y.track_op() {
        layer.statistics.await_backward(&x);
    }
    Ok(y)
}

/// Parameters and statistics of a layer.
pub(super) struct BatchNormTensors {
    pub(super) weight: Tensor,
    pub(super) bias: Tensor,
    pub(super) statistics: Arc<BatchStatistics>,
}

impl BatchNormTensors {
    pub(super) fn read(parameters: &dyn Parameters, name: &str, x: &Tensor) -> Result<Self> {
        let weight = parameters.get(&format!("{name}.weight"))?;
        let bias = parameters.get(&format!("{name}.bias"))?;
        check_dtypes(BATCH_NORM, &[x, &weight, &bias])?;
        for (what, tensor) in [("weight", &weight), ("bias", &bias)] {
            check_channels(x, &format!("{name}.{what}"), tensor)?;
        }
        let statistics = parameters.statistics(name);
        let statistics = Arc::new(statistics.unwrap_or_else(BatchStatistics::of_whole_batch));
        Ok(Self { weight, bias, statistics })
    }

    /// Moves the running statistics towards those of a batch.
    pub(super) fn follow(
        &self,
        parameters: &dyn Parameters,
        name: &str,
        moments: &BatchMoments,
        options: BatchNormOptions,
    ) -> Result<()> {
        let BatchMoments { count, means, variances } = moments;
        let unbiased = variances.iter().map(|it| it * count / (count - 1.0)).collect();
        for (what, new) in [("running_mean", means.clone()), ("running_var", unbiased)] {
            let name = format!("{name}.{what}");
            let running = parameters.buffer(&name)?;
            check_channels(&self.weight.unsqueeze(0)?, &name, &running)?;
            let new = Tensor::new(new, running.device())?;
            let kept = (running.to_dtype(DType::F64)? * (1.0 - options.momentum))?;
            let running = (kept + (new * options.momentum)?)?;
            parameters.write_buffer(&name, &running.to_dtype(DType::F32)?)?;
        }
        Ok(())
    }
}

/// Refuses a tensor whose length differs from the second dim of `x`.
pub(super) fn check_channels(x: &Tensor, name: &str, tensor: &Tensor) -> Result<()> {
    match x.dims() {
        [_, channels, ..] if tensor.dims() == [*channels] => Ok(()),
        dims => bail!(
            "{BATCH_NORM}: {name} has the shape {:?}, and x has {dims:?}: its second dim is the \
             channels",
            tensor.dims()
        ),
    }
}

/// Mean and variance of each channel of a batch.
pub(super) struct BatchMoments {
    /// Number of values of a channel.
    pub(super) count: f64,
    pub(super) means: Vec<f64>,
    /// Variances of all values, not of a sample.
    pub(super) variances: Vec<f64>,
}

impl BatchMoments {
    /// Returns the moments by a count, the sums, and the sums of the squares.
    pub(super) fn of(sums: &[f64]) -> Result<Self> {
        let (count, sums) = (sums[0], &sums[1..]);
        if count < 2.0 {
            bail!("{BATCH_NORM}: a batch has {count} values a channel, and a variance needs two")
        }
        let (sums, squares) = sums.split_at(sums.len() / 2);
        let means: Vec<f64> = sums.iter().map(|sum| sum / count).collect();
        let variance = |(square, mean): (&f64, &f64)| {
            let variance = square / count - mean * mean;
            if variance < 0.0 { 0.0 } else { variance } // NaN stays NaN
        };
        let variances = squares.iter().zip(&means).map(variance).collect();
        Ok(Self { count, means, variances })
    }
}

/// The dims of a batch.
#[derive(Clone, Copy, Debug)]
struct ChannelShape {
    channels: usize,
    /// Number of values of a channel in an item.
    values: usize,
    items: usize,
}

impl ChannelShape {
    fn of(x: &Tensor) -> Self {
        let dims = x.dims();
        Self { items: dims[0], channels: dims[1], values: dims[2..].iter().product() }
    }

    fn rows<const N: usize>(self, inputs: [Values<'_>; N]) -> Rows<'_, N> {
        Rows { inputs, width: self.channels * self.values }
    }

    /// Returns the number of values of a channel, their sums, and the sums of their squares.
    fn moments(self, x: Values<'_>) -> Vec<f64> {
        let sums = self.sums([x], |_, [x]| [x, x * x]);
        let count = (self.items * self.values) as f64;
        [count].into_iter().chain(sums).collect()
    }

    /// Sums two terms of each channel: `[2 channels]`, in the order of the items.
    fn sums<const N: usize>(
        self,
        inputs: [Values<'_>; N],
        terms: impl Fn(usize, [f64; N]) -> [f64; 2] + Sync,
    ) -> Vec<f64> {
        let zeros = || vec![0.0; 2 * self.channels];
        let (_, partials): ([Vec<f32>; 0], _) =
            self.rows(inputs).fold(zeros, |partial: &mut Vec<f64>, _, rows, []| {
                let (first, second) = partial.split_at_mut(self.channels);
                for channel in 0..self.channels {
                    let range = channel * self.values..(channel + 1) * self.values;
                    let rows = rows.map(|row| &row[range.clone()]);
                    let [one, other] = channel_sums(rows, |values| terms(channel, values));
                    first[channel] += one;
                    second[channel] += other;
                }
            });
        partials.into_iter().fold(zeros(), |mut sums, partial| {
            sums.iter_mut().zip(partial).for_each(|(sum, partial)| *sum += partial);
            sums
        })
    }
}

/// Sums two terms over the values of a channel, in eight lanes that are added at the end.
#[inline(always)]
fn channel_sums<const N: usize>(
    rows: [&[f32]; N],
    terms: impl Fn([f64; N]) -> [f64; 2],
) -> [f64; 2] {
    const LANES: usize = 8;
    let len = rows[0].len();
    let mut lanes = [[0.0; 2]; LANES];
    let add = |lane: &mut [f64; 2], index: usize| {
        let [one, other] = terms(rows.map(|row| f64::from(row[index])));
        lane[0] += one;
        lane[1] += other;
    };
    for start in (0..len).step_by(LANES) {
        for (lane, index) in lanes.iter_mut().zip(start..len) {
            add(lane, index);
        }
    }
    lanes.into_iter().fold([0.0; 2], |sum, lane| [sum[0] + lane[0], sum[1] + lane[1]])
}

/// A batch norm by given moments, whose gradients take part in the moments.
struct BatchNorm {
    shape: ChannelShape,
    means: Vec<f32>,
    /// One divided by the standard deviation of each channel.
    scales: Vec<f32>,
    count: f64,
    statistics: Arc<BatchStatistics>,
}

impl BatchNorm {
    fn values<T: LayerElement>(&self, x: Values<'_>, weight: &[f32], bias: &[f32]) -> Vec<T> {
        let values = self.shape.values;
        let [y] = self.shape.rows([x]).map(|_, [x], [y]| {
            for channel in 0..self.shape.channels {
                let range = channel * values..(channel + 1) * values;
                let factor = self.scales[channel] * weight[channel];
                let (mean, bias) = (self.means[channel], bias[channel]);
                for (y, x) in y[range.clone()].iter_mut().zip(&x[range]) {
                    *y = (x - mean) * factor + bias;
                }
            }
        });
        y
    }

    /// Sums of each channel over this rank's items: the gradients of the output, and their products
    /// with the normalized values.
    fn own_sums(&self, x: Values<'_>, g: Values<'_>) -> Vec<f64> {
        self.shape.sums([x, g], |channel, [x, g]| {
            let normalized = (x - f64::from(self.means[channel])) * f64::from(self.scales[channel]);
            [g, g * normalized]
        })
    }

    /// Returns the gradient of `x`, by the sums of all ranks.
    fn of_x(&self, x: Values<'_>, g: Values<'_>, weight: &[f32], sums: &[f64]) -> Vec<f32> {
        let values = self.shape.values;
        let mean = |sum: &f64| narrow(sum / self.count);
        let means: Vec<f32> = sums.iter().map(mean).collect();
        let (shifts, alongs) = means.split_at(self.shape.channels);
        let [of_x] = self.shape.rows([x, g]).map(|_, [x, g], [of_x]| {
            for channel in 0..self.shape.channels {
                let range = channel * values..(channel + 1) * values;
                let scale = self.scales[channel];
                let factor = scale * weight[channel];
                let (mean, shift) = (self.means[channel], shifts[channel]);
                let along = alongs[channel] * scale;
                let pairs = x[range.clone()].iter().zip(&g[range.clone()]);
                for (of_x, (x, g)) in of_x[range].iter_mut().zip(pairs) {
                    *of_x = (g - shift - (x - mean) * along) * factor;
                }
            }
        });
        of_x
    }
}

impl CpuLayer<3> for BatchNorm {
    fn name(&self) -> &'static str {
        BATCH_NORM
    }

    fn forward(&self, [x, weight, bias]: [LayerInput<'_>; 3]) -> Result<(CpuStorage, Shape)> {
        let weight = weight.wide(BATCH_NORM)?;
        let bias = bias.wide(BATCH_NORM)?;
        with_element!(x.dtype(), BATCH_NORM, T => {
            output::<T>(self.values(x.values(BATCH_NORM)?, &weight, &bias), x.dims())
        })
    }

    fn backward(
        &self,
        [x, weight, bias]: [LayerInput<'_>; 3],
        g: &Gradient,
    ) -> Result<LayerGradients<3>> {
        let values = x.values(BATCH_NORM)?;
        let g = Values::F32(g.elements());
        let own = self.own_sums(values, g);
        let sums = self.statistics.backward(own.clone())?;
        let of_x = || Ok(self.of_x(values, g, &weight.wide(BATCH_NORM)?, &sums));
        let (of_bias, of_weight) = own.split_at(self.shape.channels);
        let narrowed = |sums: &[f64]| sums.iter().copied().map(narrow).collect();
        let of_weight = weight.gradient(|| Ok(narrowed(of_weight)))?;
        Ok([x.gradient(of_x)?, of_weight, bias.gradient(|| Ok(narrowed(of_bias)))?])
    }
}
