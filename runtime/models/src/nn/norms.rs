//! LayerNorm and RMSNorm.

use candle_core::{CpuStorage, Result, Shape, Tensor};
use hsdp_candle::Gradient;
use hsdp_kernels::Values;

use super::composed;
use super::element::{LayerElement, LayerInput, check_dtypes, check_weight, narrow, with_element};
use super::layer::{CpuLayer, LayerGradients, apply, output};
use super::rows::{Rows, in_order, sum, sum_of_pairs};

const LAYER_NORM: &str = "layer_norm";
const RMS_NORM: &str = "rms_norm";

/// Normalizes the last dim of `x` to mean 0 and variance 1, then multiplies it by `weight` and adds
/// `bias`. The divisor is `sqrt(variance + eps)`, with the variance of all elements, not of a
/// sample.
///
/// On a GPU this is [`composed::layer_norm`].
///
/// # Errors
/// If `weight` or `bias` is not of one dim as long as the last of `x`, or a dtype is not f32, bf16
/// or f16.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    check_dtypes(LAYER_NORM, &[x, weight, bias])?;
    check_weight(LAYER_NORM, x, "weight", weight)?;
    check_weight(LAYER_NORM, x, "bias", bias)?;
    if !x.device().is_cpu() {
        return composed::layer_norm(x, weight, bias, eps);
    }
    apply(LayerNorm { eps: narrow(eps) }, [x, weight, bias])
}

struct LayerNorm {
    eps: f32,
}

/// Mean of a row, and one divided by its standard deviation.
#[derive(Clone, Copy)]
struct Moments {
    mean: f32,
    scale: f32,
}

/// Partial sums of the gradients of the weight and of the bias.
struct Affine {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl LayerNorm {
    #[inline(always)]
    fn moments(&self, x: &[f32]) -> Moments {
        let width = x.len() as f32;
        let mean = sum(x, |x| x) / width;
        let variance = sum(x, |x| (x - mean) * (x - mean)) / width;
        Moments { mean, scale: 1.0 / (variance + self.eps).sqrt() }
    }

    fn rows<T: LayerElement>(&self, x: Values<'_>, weight: &[f32], bias: &[f32]) -> Vec<T> {
        let rows = Rows { inputs: [x], width: weight.len() };
        let [y] = rows.map(|_, [x], [y]| {
            let Moments { mean, scale } = self.moments(x);
            for ((y, x), (weight, bias)) in y.iter_mut().zip(x).zip(weight.iter().zip(bias)) {
                *y = (x - mean) * scale * weight + bias;
            }
        });
        y
    }

    /// Returns the gradients of `x`, and of the weight and the bias.
    fn gradients(&self, inputs: [Values<'_>; 2], weight: &[f32]) -> (Vec<f32>, Affine) {
        let width = weight.len();
        let zeros = || Affine { weight: vec![0.0; width], bias: vec![0.0; width] };
        let rows = Rows { inputs, width };
        let ([of_x], partials) = rows.fold(zeros, |partial, _, [x, g], [of_x]| {
            let moments = self.moments(x);
            moments.backward([x, g], weight, of_x);
            partial.add(moments, [x, g]);
        });
        let (weights, biases): (Vec<_>, Vec<_>) =
            partials.into_iter().map(|partial| (partial.weight, partial.bias)).unzip();
        (of_x, Affine { weight: in_order(width, weights), bias: in_order(width, biases) })
    }
}

impl Moments {
    /// Computes the gradient of a row from the row and the gradient of the output.
    #[inline(always)]
    fn backward(self, [x, g]: [&[f32]; 2], weight: &[f32], of_x: &mut [f32]) {
        let Self { mean, scale } = self;
        for ((of_x, g), weight) in of_x.iter_mut().zip(g).zip(weight) {
            *of_x = g * weight;
        }
        let width = x.len() as f32;
        let shift = sum(of_x, |g| g) / width;
        let along = sum_of_pairs(of_x, x, |g, x| g * (x - mean)) * scale / width;
        for (of_x, x) in of_x.iter_mut().zip(x) {
            *of_x = (*of_x - shift - (x - mean) * scale * along) * scale;
        }
    }
}

impl Affine {
    #[inline(always)]
    fn add(&mut self, Moments { mean, scale }: Moments, [x, g]: [&[f32]; 2]) {
        let of = self.weight.iter_mut().zip(&mut self.bias);
        for ((of_weight, of_bias), (x, g)) in of.zip(x.iter().zip(g)) {
            *of_weight += g * ((x - mean) * scale);
            *of_bias += g;
        }
    }
}

impl CpuLayer<3> for LayerNorm {
    fn name(&self) -> &'static str {
        LAYER_NORM
    }

    fn forward(&self, [x, weight, bias]: [LayerInput<'_>; 3]) -> Result<(CpuStorage, Shape)> {
        let weight = weight.wide(LAYER_NORM)?;
        let bias = bias.wide(LAYER_NORM)?;
        with_element!(x.dtype(), LAYER_NORM, T => {
            output::<T>(self.rows(x.values(LAYER_NORM)?, &weight, &bias), x.dims())
        })
    }

    fn backward(
        &self,
        [x, weight, bias]: [LayerInput<'_>; 3],
        g: &Gradient,
    ) -> Result<LayerGradients<3>> {
        let inputs = [x.values(LAYER_NORM)?, Values::F32(g.elements())];
        let (of_x, of) = self.gradients(inputs, &weight.wide(LAYER_NORM)?);
        let of_weight = weight.gradient(|| Ok(of.weight))?;
        Ok([x.gradient(|| Ok(of_x))?, of_weight, bias.gradient(|| Ok(of.bias))?])
    }
}

/// Divides the last dim of `x` by its root mean square, `sqrt(mean(x^2) + eps)`, and multiplies it
/// by `weight`.
///
/// On a GPU this is [`composed::rms_norm`].
///
/// # Errors
/// If `weight` is not of one dim as long as the last of `x`, or a dtype is not f32, bf16 or f16.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check_dtypes(RMS_NORM, &[x, weight])?;
    check_weight(RMS_NORM, x, "weight", weight)?;
    if !x.device().is_cpu() {
        return composed::rms_norm(x, weight, eps);
    }
    apply(RmsNormOp { eps: narrow(eps) }, [x, weight])
}

struct RmsNormOp {
    eps: f32,
}

impl RmsNormOp {
    /// Returns one divided by the root mean square.
    #[inline(always)]
    fn scale(&self, x: &[f32]) -> f32 {
        1.0 / (sum(x, |x| x * x) / x.len() as f32 + self.eps).sqrt()
    }

    fn rows<T: LayerElement>(&self, x: Values<'_>, weight: &[f32]) -> Vec<T> {
        let rows = Rows { inputs: [x], width: weight.len() };
        let [y] = rows.map(|_, [x], [y]| {
            let scale = self.scale(x);
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                *y = x * scale * weight;
            }
        });
        y
    }

    /// Returns the gradients of `x` and of the weight.
    fn gradients(&self, inputs: [Values<'_>; 2], weight: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let width = weight.len();
        let zeros = || vec![0.0; width];
        let rows = Rows { inputs, width };
        let ([of_x], of_weight) = rows.fold(zeros, |of_weight, _, [x, g], [of_x]| {
            let scale = self.scale(x);
            for ((of_x, g), weight) in of_x.iter_mut().zip(g).zip(weight) {
                *of_x = g * weight;
            }
            let mean = sum_of_pairs(of_x, x, |g, x| g * x) / width as f32;
            let along = mean * scale * scale;
            for ((of_x, of_weight), (x, g)) in of_x.iter_mut().zip(of_weight).zip(x.iter().zip(g)) {
                *of_x = (*of_x - x * along) * scale;
                *of_weight += g * x * scale;
            }
        });
        (of_x, in_order(width, of_weight))
    }
}

impl CpuLayer<2> for RmsNormOp {
    fn name(&self) -> &'static str {
        RMS_NORM
    }

    fn forward(&self, [x, weight]: [LayerInput<'_>; 2]) -> Result<(CpuStorage, Shape)> {
        let weight = weight.wide(RMS_NORM)?;
        with_element!(x.dtype(), RMS_NORM, T => {
            output::<T>(self.rows(x.values(RMS_NORM)?, &weight), x.dims())
        })
    }

    fn backward(
        &self,
        [x, weight]: [LayerInput<'_>; 2],
        g: &Gradient,
    ) -> Result<LayerGradients<2>> {
        let inputs = [x.values(RMS_NORM)?, Values::F32(g.elements())];
        let (of_x, of_weight) = self.gradients(inputs, &weight.wide(RMS_NORM)?);
        Ok([x.gradient(|| Ok(of_x))?, weight.gradient(|| Ok(of_weight))?])
    }
}
