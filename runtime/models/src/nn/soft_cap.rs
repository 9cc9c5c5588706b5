//! Soft caps.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};

use super::composed;
use super::element::{Element, Lent, check_dtypes, elements, gradient, narrow, with_element};
use super::exp::tanh;
use super::rows::{ANY_WIDTH, Rows};

const NAME: &str = "soft_cap";

/// Computes `cap * tanh(x / cap)`, which is nearly `x` for small `x` and never beyond the cap.
/// Gemma 2 applies it to its logits.
///
/// On a GPU this is [`composed::soft_cap`].
///
/// # Errors
/// If the dtype is not f32, bf16 or f16, or the cap is not positive and finite in f32.
pub fn soft_cap(x: &Tensor, cap: f64) -> Result<Tensor> {
    check_dtypes(NAME, &[x])?;
    let op = SoftCap(Cap::of(NAME, cap)?);
    if !x.device().is_cpu() {
        return composed::soft_cap(x, cap);
    }
    x.contiguous()?.apply_op1(op)
}

/// A positive bound.
#[derive(Clone, Copy)]
pub(super) struct Cap(f32);

impl Cap {
    /// Returns the cap of an op.
    pub(super) fn of(op: &'static str, cap: f64) -> Result<Self> {
        let narrow = narrow(cap);
        if !(narrow.is_normal() && narrow > 0.0) {
            bail!("{op}: the cap is {cap:?}: it must be positive and finite in f32")
        }
        Ok(Self(narrow))
    }

    #[inline(always)]
    pub(super) fn value(self, x: f32) -> f32 {
        self.0 * tanh(x / self.0).0
    }

    #[inline(always)]
    pub(super) fn derivative(self, x: f32) -> f32 {
        tanh(x / self.0).1
    }
}

struct SoftCap(Cap);

impl SoftCap {
    fn forward<T: Element>(&self, x: &[T]) -> Vec<T> {
        let [y] = Rows { inputs: [x], width: ANY_WIDTH }.map(|_, [x], [y]| {
            y.iter_mut().zip(x).for_each(|(y, x)| *y = self.0.value(*x));
        });
        y
    }

    fn backward<T: Element>(&self, inputs: [&[T]; 2]) -> Vec<T> {
        let [of_x] = Rows { inputs, width: ANY_WIDTH }.map(|_, [x, g], [of_x]| {
            for ((of_x, x), g) in of_x.iter_mut().zip(x).zip(g) {
                *of_x = g * self.0.derivative(*x);
            }
        });
        of_x
    }
}

impl CustomOp1 for SoftCap {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_element!(x.dtype(), NAME, T => {
            let y = self.forward(elements::<T>(x, layout)?);
            Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, g: &Tensor) -> Result<Option<Tensor>> {
        let g = g.detach().contiguous()?;
        let (lent, lent_g) = (Lent::of(x), Lent::of(&g));
        with_element!(x.dtype(), NAME, T => {
            gradient(x, self.backward([lent.elements::<T>()?, lent_g.elements::<T>()?]))
        })
    }
}
