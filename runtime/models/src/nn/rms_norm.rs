//! RMSNorm.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType};

use super::element::{
    Element, Lent, check_dtypes, check_weight, elements, gradient, narrow, weight_gradient, wide,
    with_element,
};
use super::rows::{Rows, in_order};
use super::{composed, lanes};

const NAME: &str = "rms_norm";

/// Divides the last dim of `x` by its root mean square, `sqrt(mean(x^2) + eps)`, and multiplies it
/// by `weight`.
///
/// On a GPU this is [`composed::rms_norm`].
///
/// # Errors
/// If `weight` is not of one dim as long as the last of `x`, or a dtype is not f32, bf16 or f16.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check_dtypes(NAME, &[x, weight])?;
    check_weight(NAME, x, ("weight", weight))?;
    if !x.device().is_cpu() {
        return composed::rms_norm(x, weight, eps);
    }
    x.contiguous()?.apply_op2(&weight.contiguous()?, RmsNorm { eps: narrow(eps) })
}

struct RmsNorm {
    eps: f32,
}

impl RmsNorm {
    /// Returns one divided by the root mean square.
    #[inline(always)]
    fn scale(&self, x: &[f32]) -> f32 {
        1.0 / (lanes::sum(x, |x| x * x) / x.len() as f32 + self.eps).sqrt()
    }

    fn forward<T: Element>(&self, x: &[T], weight: &[f32]) -> Vec<T> {
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
    fn backward<T: Element>(&self, inputs: [&[T]; 2], weight: &[f32]) -> (Vec<T>, Vec<f32>) {
        let width = weight.len();
        let zeros = || vec![0.0; width];
        let rows = Rows { inputs, width };
        let ([of_x], of_weight) = rows.fold(zeros, |of_weight, _, [x, g], [of_x]| {
            let scale = self.scale(x);
            for ((of_x, g), weight) in of_x.iter_mut().zip(g).zip(weight) {
                *of_x = g * weight;
            }
            let mean = lanes::sum_of_pairs(of_x, x, |g, x| g * x) / width as f32;
            let along = mean * scale * scale;
            for ((of_x, of_weight), (x, g)) in of_x.iter_mut().zip(of_weight).zip(x.iter().zip(g)) {
                *of_x = (*of_x - x * along) * scale;
                *of_weight += g * x * scale;
            }
        });
        (of_x, in_order(width, of_weight))
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let weight = wide(NAME, weight, weight_layout)?;
        with_element!(x.dtype(), NAME, T => {
            let y = self.forward(elements::<T>(x, x_layout)?, &weight);
            Ok((T::to_cpu_storage_owned(y), x_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        g: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let g = g.detach().contiguous()?;
        let (lent, lent_weight, lent_g) = (Lent::of(x), Lent::of(weight), Lent::of(&g));
        with_element!(x.dtype(), NAME, T => {
            let inputs = [lent.elements::<T>()?, lent_g.elements::<T>()?];
            let (of_x, of_weight) = self.backward(inputs, &lent_weight.wide(NAME)?);
            Ok((gradient(x, of_x)?, weight_gradient(weight, of_weight)?))
        })
    }
}
