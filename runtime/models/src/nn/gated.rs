//! Gated activations: a function of one tensor, times another.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType};

use super::element::{Element, Lent, check_alike, check_dtypes, elements, gradient, with_element};
use super::exp::sigmoid;
use super::rows::{ANY_WIDTH, Rows};
use super::{composed, gelu};

/// Computes `silu(gate) * up`, where silu is `x / (1 + e^-x)`: the hidden layer of Llama.
///
/// On a GPU this is [`composed::silu_mul`].
///
/// # Errors
/// If `gate` and `up` differ in shape or dtype, or the dtype is not f32, bf16 or f16.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    apply(gate, up, Gated { name: "silu_mul", activation: silu, composed: composed::silu_mul })
}

/// Computes `gelu(gate) * up`, where gelu is in its tanh form: the hidden layer of Gemma.
///
/// On a GPU this is [`composed::gelu_mul`].
///
/// # Errors
/// The errors of [`silu_mul`].
pub fn gelu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let activation = gelu::value_and_derivative;
    apply(gate, up, Gated { name: "gelu_mul", activation, composed: composed::gelu_mul })
}

/// Computes silu and its derivative at `x`.
#[inline(always)]
fn silu(x: f32) -> (f32, f32) {
    let (share, slope) = sigmoid(x);
    (x * share, share + x * slope)
}

type Composed = fn(&Tensor, &Tensor) -> Result<Tensor>;

/// An op that is generic over its activation, so that the compiler can vectorize the loop.
struct Gated<F> {
    name: &'static str,
    activation: F,
    composed: Composed,
}

/// A function that returns the value and the derivative of an activation.
trait Activation: Fn(f32) -> (f32, f32) + Send + Sync + 'static {}

impl<F: Fn(f32) -> (f32, f32) + Send + Sync + 'static> Activation for F {}

fn apply(gate: &Tensor, up: &Tensor, op: Gated<impl Activation>) -> Result<Tensor> {
    check_dtypes(op.name, &[gate, up])?;
    check_alike(op.name, ("gate", gate), ("up", up))?;
    if !gate.device().is_cpu() {
        return (op.composed)(gate, up);
    }
    gate.contiguous()?.apply_op2(&up.contiguous()?, op)
}

impl<F: Activation> Gated<F> {
    fn forward<T: Element>(&self, inputs: [&[T]; 2]) -> Vec<T> {
        let [y] = Rows { inputs, width: ANY_WIDTH }.map(|_, [gate, up], [y]| {
            for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                *y = (self.activation)(*gate).0 * up;
            }
        });
        y
    }

    /// Returns the gradients of gate and up.
    fn backward<T: Element>(&self, inputs: [&[T]; 3]) -> [Vec<T>; 2] {
        Rows { inputs, width: ANY_WIDTH }.map(|_, [gate, up, g], [of_gate, of_up]| {
            let of = of_gate.iter_mut().zip(of_up);
            for (((of_gate, of_up), gate), (up, g)) in of.zip(gate).zip(up.iter().zip(g)) {
                let (value, derivative) = (self.activation)(*gate);
                *of_gate = g * up * derivative;
                *of_up = g * value;
            }
        })
    }
}

impl<F: Activation> CustomOp2 for Gated<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        with_element!(gate.dtype(), self.name, T => {
            let inputs = [elements::<T>(gate, gate_layout)?, elements::<T>(up, up_layout)?];
            Ok((T::to_cpu_storage_owned(self.forward(inputs)), gate_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _y: &Tensor,
        g: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let g = g.detach().contiguous()?;
        let lent = [gate, up, &g].map(Lent::of);
        with_element!(gate.dtype(), self.name, T => {
            let [lent_gate, lent_up, lent_g] = &lent;
            let inputs = [lent_gate.elements::<T>()?, lent_up.elements()?, lent_g.elements()?];
            let [of_gate, of_up] = self.backward(inputs);
            Ok((gradient(gate, of_gate)?, gradient(up, of_up)?))
        })
    }
}
