//! GELU in its tanh form.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType};

use super::composed;
use super::element::{Element, Lent, check_dtypes, elements, gradient, with_element};
use super::exp::sigmoid;
use super::rows::{ANY_WIDTH, Rows};

const NAME: &str = "gelu";

/// Value of `2 sqrt(2 / pi)`.
const SCALE: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

/// Computes GELU in its tanh form, `x (1 + tanh z) / 2` with `z = sqrt(2 / pi) (x + 0.044715 x^3)`.
///
/// On a GPU this is [`composed::gelu`].
///
/// # Errors
/// If the dtype is not f32, bf16 or f16.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    check_dtypes(NAME, &[x])?;
    if !x.device().is_cpu() {
        return composed::gelu(x);
    }
    x.contiguous()?.apply_op1(Gelu)
}

/// Computes GELU and its derivative at `x`. `(1 + tanh z) / 2` is the sigmoid of `2 z`.
#[inline(always)]
pub(super) fn value_and_derivative(x: f32) -> (f32, f32) {
    let (share, slope) = sigmoid(x * (SCALE + SCALE * CUBIC * (x * x)));
    (x * share, share + x * slope * (SCALE + 3.0 * SCALE * CUBIC * (x * x)))
}

struct Gelu;

fn forward<T: Element>(x: &[T]) -> Vec<T> {
    let [y] = Rows { inputs: [x], width: ANY_WIDTH }.map(|_, [x], [y]| {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = value_and_derivative(*x).0);
    });
    y
}

fn backward<T: Element>(inputs: [&[T]; 2]) -> Vec<T> {
    let [of_x] = Rows { inputs, width: ANY_WIDTH }.map(|_, [x, g], [of_x]| {
        for ((of_x, x), g) in of_x.iter_mut().zip(x).zip(g) {
            *of_x = g * value_and_derivative(*x).1;
        }
    });
    of_x
}

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_element!(x.dtype(), NAME, T => {
            let y = forward(elements::<T>(x, layout)?);
            Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, g: &Tensor) -> Result<Option<Tensor>> {
        let g = g.detach().contiguous()?;
        let (lent, lent_g) = (Lent::of(x), Lent::of(&g));
        with_element!(x.dtype(), NAME, T => {
            gradient(x, backward([lent.elements::<T>()?, lent_g.elements::<T>()?]))
        })
    }
}
