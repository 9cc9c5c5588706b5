//! LayerNorm.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType};

use super::element::{
    Element, Lent, check_dtypes, check_weight, elements, gradient, narrow, weight_gradient, wide,
    with_element,
};
use super::rows::{Rows, in_order};
use super::{composed, lanes};

const NAME: &str = "layer_norm";

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
    check_dtypes(NAME, &[x, weight, bias])?;
    check_weight(NAME, x, ("weight", weight))?;
    check_weight(NAME, x, ("bias", bias))?;
    if !x.device().is_cpu() {
        return composed::layer_norm(x, weight, bias, eps);
    }
    let op = LayerNorm { eps: narrow(eps) };
    x.contiguous()?.apply_op3(&weight.contiguous()?, &bias.contiguous()?, op)
}

struct LayerNorm {
    eps: f32,
}

/// Partial sums of the gradients of the weight and of the bias.
struct Affine {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl LayerNorm {
    /// Returns the mean of a row, and one divided by its standard deviation.
    #[inline(always)]
    fn moments(&self, x: &[f32]) -> (f32, f32) {
        let width = x.len() as f32;
        let mean = lanes::sum(x, |x| x) / width;
        let variance = lanes::sum(x, |x| (x - mean) * (x - mean)) / width;
        (mean, 1.0 / (variance + self.eps).sqrt())
    }

    fn forward<T: Element>(&self, x: &[T], weight: &[f32], bias: &[f32]) -> Vec<T> {
        let rows = Rows { inputs: [x], width: weight.len() };
        let [y] = rows.map(|_, [x], [y]| {
            let (mean, scale) = self.moments(x);
            for ((y, x), (weight, bias)) in y.iter_mut().zip(x).zip(weight.iter().zip(bias)) {
                *y = (x - mean) * scale * weight + bias;
            }
        });
        y
    }

    /// Returns the gradients of `x`, and of the weight and the bias.
    fn backward<T: Element>(&self, inputs: [&[T]; 2], weight: &[f32]) -> (Vec<T>, Affine) {
        let width = weight.len();
        let zeros = || Affine { weight: vec![0.0; width], bias: vec![0.0; width] };
        let rows = Rows { inputs, width };
        let ([of_x], partials) = rows.fold(zeros, |partial, _, [x, g], [of_x]| {
            let moments = self.moments(x);
            backward_of_row(moments, [x, g], weight, of_x);
            partial.add(moments, [x, g]);
        });
        let (weights, biases): (Vec<_>, Vec<_>) =
            partials.into_iter().map(|partial| (partial.weight, partial.bias)).unzip();
        (of_x, Affine { weight: in_order(width, weights), bias: in_order(width, biases) })
    }
}

/// Computes the gradient of a row from its moments, the row and the gradient of the output.
#[inline(always)]
fn backward_of_row(
    (mean, scale): (f32, f32),
    [x, g]: [&[f32]; 2],
    weight: &[f32],
    of_x: &mut [f32],
) {
    for ((of_x, g), weight) in of_x.iter_mut().zip(g).zip(weight) {
        *of_x = g * weight;
    }
    let width = x.len() as f32;
    let shift = lanes::sum(of_x, |g| g) / width;
    let along = lanes::sum_of_pairs(of_x, x, |g, x| g * (x - mean)) * scale / width;
    for (of_x, x) in of_x.iter_mut().zip(x) {
        *of_x = (*of_x - shift - (x - mean) * scale * along) * scale;
    }
}

impl Affine {
    #[inline(always)]
    fn add(&mut self, (mean, scale): (f32, f32), [x, g]: [&[f32]; 2]) {
        let of = self.weight.iter_mut().zip(&mut self.bias);
        for ((of_weight, of_bias), (x, g)) in of.zip(x.iter().zip(g)) {
            *of_weight += g * ((x - mean) * scale);
            *of_bias += g;
        }
    }
}

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let weight = wide(NAME, weight, weight_layout)?;
        let bias = wide(NAME, bias, bias_layout)?;
        with_element!(x.dtype(), NAME, T => {
            let y = self.forward(elements::<T>(x, x_layout)?, &weight, &bias);
            Ok((T::to_cpu_storage_owned(y), x_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        g: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let g = g.detach().contiguous()?;
        let (lent, lent_weight, lent_g) = (Lent::of(x), Lent::of(weight), Lent::of(&g));
        with_element!(x.dtype(), NAME, T => {
            let inputs = [lent.elements::<T>()?, lent_g.elements::<T>()?];
            let (of_x, of) = self.backward(inputs, &lent_weight.wide(NAME)?);
            let of_weight = weight_gradient(weight, of.weight)?;
            Ok((gradient(x, of_x)?, of_weight, weight_gradient(bias, of.bias)?))
        })
    }
}
