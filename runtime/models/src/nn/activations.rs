//! Functions of single elements: GELU, soft caps, and gated activations, which are a function of
//! one tensor times another. Their exponentials can be vectorized, and have the same bits on all
//! machines.

use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use hsdp_candle::Gradient;
use hsdp_kernels::Values;

use super::composed;
use super::element::{LayerInput, check_dtypes, narrow, with_element};
use super::layer::{CpuLayer, LayerGradients, apply, output};
use super::rows::{ANY_WIDTH, Rows};

/// Smallest exponent. For a smaller x, e^x counts as 0. The smallest normal f32 is a little below
/// e^-87.
const LEAST: f32 = -87.0;

/// Constant 1.5 * 2^23. Adding it to a small number rounds the number to an integer, which is then
/// in the last bits of the sum.
const ROUNDER: f32 = 12_582_912.0;

/// ln 2 as a sum of two parts. A multiple of the first by an integer below 2^15 is exact.
const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// Coefficients of `(e^x - 1 - x) / x^2` for |x| <= ln 2 / 2, highest first, from the Cephes
/// library.
const COEFFICIENTS: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// Magnitude below which [`tanh`] is a polynomial, because `1 - e^-2x` would lose digits.
const SMALL: f32 = 0.625;

/// Coefficients of `(tanh x - x) / x^3` as a polynomial in `x^2` for |x| <= 0.625, highest first,
/// from the Cephes library.
const TANH: [f32; 5] =
    [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];

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
    check_dtypes("gelu", &[x])?;
    if !x.device().is_cpu() {
        return composed::gelu(x);
    }
    apply(Elementwise { name: "gelu", function: Gelu }, [x])
}

/// Computes `cap * tanh(x / cap)`, which is nearly `x` for small `x` and never beyond the cap.
/// Gemma 2 applies it to its logits.
///
/// On a GPU this is [`composed::soft_cap`].
///
/// # Errors
/// If the dtype is not f32, bf16 or f16, or the cap is not positive and finite in f32.
pub fn soft_cap(x: &Tensor, cap: f64) -> Result<Tensor> {
    check_dtypes("soft_cap", &[x])?;
    let function = Cap::of("soft_cap", cap)?;
    if !x.device().is_cpu() {
        return composed::soft_cap(x, cap);
    }
    apply(Elementwise { name: "soft_cap", function }, [x])
}

/// Computes `silu(gate) * up`, where silu is `x / (1 + e^-x)`: the hidden layer of Llama.
///
/// On a GPU this is [`composed::silu_mul`].
///
/// # Errors
/// If `gate` and `up` differ in shape or dtype, or the dtype is not f32, bf16 or f16.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated(gate, up, Gated { name: "silu_mul", activation: Silu, composed: composed::silu_mul })
}

/// Computes `gelu(gate) * up`, where gelu is in its tanh form: the hidden layer of Gemma.
///
/// On a GPU this is [`composed::gelu_mul`].
///
/// # Errors
/// The errors of [`silu_mul`].
pub fn gelu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated(gate, up, Gated { name: "gelu_mul", activation: Gelu, composed: composed::gelu_mul })
}

/// Computes `a + b`, for two tensors of one shape and dtype, such as a residual stream and the
/// output of a block. The backward passes one gradient to both, without a copy.
///
/// On a GPU this is candle's sum.
///
/// # Errors
/// If `a` and `b` differ in shape or dtype, or the dtype is not f32, bf16 or f16.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    check_alike("add", [("a", a), ("b", b)])?;
    match a.device().is_cpu() {
        true => apply(Sum, [a, b]),
        false => a + b,
    }
}

/// Refuses two tensors of which the dtypes or the shapes differ.
fn check_alike(op: &'static str, [(one, a), (other, b)]: [(&str, &Tensor); 2]) -> Result<()> {
    check_dtypes(op, &[a, b])?;
    if a.dtype() != b.dtype() || a.dims() != b.dims() {
        let described =
            |tensor: &Tensor| format!("{} {:?}", tensor.dtype().as_str(), tensor.dims());
        bail!("{op}: {one} is {} and {other} is {}: both must be alike", described(a), described(b))
    }
    Ok(())
}

struct Sum;

impl CpuLayer<2> for Sum {
    fn name(&self) -> &'static str {
        "add"
    }

    fn forward(&self, [a, b]: [LayerInput<'_>; 2]) -> Result<(CpuStorage, Shape)> {
        with_element!(a.dtype(), "add", T => {
            let [y] = rows([a.values("add")?, b.values("add")?]).map(|_, [a, b], [y]| {
                y.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (a, b))| *y = a + b);
            });
            output::<T>(y, a.dims())
        })
    }

    fn backward(&self, [a, b]: [LayerInput<'_>; 2], g: &Gradient) -> Result<LayerGradients<2>> {
        Ok([a, b].map(|it| it.is_tracked().then(|| g.clone())))
    }
}

/// An op on each element. It is generic over its function, so that the compiler can vectorize the
/// loop.
struct Elementwise<F> {
    name: &'static str,
    function: F,
}

/// A function with its derivative. It is inlined into the loop, to be compiled for its vectors.
trait GateFunction: Send + Sync + 'static {
    /// Computes the value and the derivative at `x`.
    fn at(&self, x: f32) -> (f32, f32);
}

struct Gelu;

impl GateFunction for Gelu {
    /// `(1 + tanh z) / 2` is the sigmoid of `2 z`.
    #[inline(always)]
    fn at(&self, x: f32) -> (f32, f32) {
        let (share, slope) = sigmoid(x * (SCALE + SCALE * CUBIC * (x * x)));
        (x * share, share + x * slope * (SCALE + 3.0 * SCALE * CUBIC * (x * x)))
    }
}

struct Silu;

impl GateFunction for Silu {
    #[inline(always)]
    fn at(&self, x: f32) -> (f32, f32) {
        let (share, slope) = sigmoid(x);
        (x * share, share + x * slope)
    }
}

impl GateFunction for Cap {
    #[inline(always)]
    fn at(&self, x: f32) -> (f32, f32) {
        (self.value(x), self.derivative(x))
    }
}

impl<F: GateFunction> CpuLayer<1> for Elementwise<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn forward(&self, [x]: [LayerInput<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        with_element!(x.dtype(), self.name, T => {
            let [y] = rows([x.values(self.name)?]).map(|_, [x], [y]| {
                y.iter_mut().zip(x).for_each(|(y, x)| *y = self.function.at(*x).0);
            });
            output::<T>(y, x.dims())
        })
    }

    fn backward(&self, [x]: [LayerInput<'_>; 1], g: &Gradient) -> Result<LayerGradients<1>> {
        let inputs = [x.values(self.name)?, Values::F32(g.elements())];
        let [of_x] = rows(inputs).map(|_, [x, g], [of_x]| {
            for ((of_x, x), g) in of_x.iter_mut().zip(x).zip(g) {
                *of_x = g * self.function.at(*x).1;
            }
        });
        Ok([x.gradient(|| Ok(of_x))?])
    }
}

fn rows<const N: usize>(inputs: [Values<'_>; N]) -> Rows<'_, N> {
    Rows { inputs, width: ANY_WIDTH }
}

type ComposedGate = fn(&Tensor, &Tensor) -> Result<Tensor>;

/// An op that is generic over its activation, so that the compiler can vectorize the loop.
struct Gated<F> {
    name: &'static str,
    activation: F,
    composed: ComposedGate,
}

fn gated(gate: &Tensor, up: &Tensor, op: Gated<impl GateFunction>) -> Result<Tensor> {
    check_alike(op.name, [("gate", gate), ("up", up)])?;
    if !gate.device().is_cpu() {
        return (op.composed)(gate, up);
    }
    apply(op, [gate, up])
}

impl<F: GateFunction> CpuLayer<2> for Gated<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn forward(&self, [gate, up]: [LayerInput<'_>; 2]) -> Result<(CpuStorage, Shape)> {
        with_element!(gate.dtype(), self.name, T => {
            let inputs = [gate.values(self.name)?, up.values(self.name)?];
            let [y] = rows(inputs).map(|_, [gate, up], [y]| {
                for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                    *y = self.activation.at(*gate).0 * up;
                }
            });
            output::<T>(y, gate.dims())
        })
    }

    fn backward(&self, [gate, up]: [LayerInput<'_>; 2], g: &Gradient) -> Result<LayerGradients<2>> {
        let inputs = [gate.values(self.name)?, up.values(self.name)?, Values::F32(g.elements())];
        let [of_gate, of_up] = rows(inputs).map(|_, [gate, up, g], [of_gate, of_up]| {
            let of = of_gate.iter_mut().zip(of_up);
            for (((of_gate, of_up), gate), (up, g)) in of.zip(gate).zip(up.iter().zip(g)) {
                let (value, derivative) = self.activation.at(*gate);
                *of_gate = g * up * derivative;
                *of_up = g * value;
            }
        });
        Ok([gate.gradient(|| Ok(of_gate))?, up.gradient(|| Ok(of_up))?])
    }
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

/// Computes `e^x` for `x <= 0`, with a relative error below 2e-7. NaN gives NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let power = shifted - ROUNDER;
    let rest = x - power * LN_2[0] - power * LN_2[1];
    let tail = COEFFICIENTS.iter().fold(0.0, |sum, coefficient| sum * rest + coefficient);
    let of_rest = tail * rest * rest + rest + 1.0;
    let two_to_power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < LEAST { 0.0 } else { of_rest * two_to_power }
}

/// Computes `1 / (1 + e^-x)` and its derivative.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> (f32, f32) {
    let small = exp(-x.abs());
    let large = 1.0 / (1.0 + small);
    let value = if x >= 0.0 { large } else { small * large };
    (value, small * large * large)
}

/// Computes `tanh x` and its derivative, with relative errors below 4e-7.
#[inline(always)]
pub(super) fn tanh(x: f32) -> (f32, f32) {
    let square = x * x;
    let tail = TANH.iter().fold(0.0, |sum, coefficient| sum * square + coefficient);
    let of_small = tail * square * x + x;
    let power = exp(-2.0 * x.abs());
    let share = 1.0 / (1.0 + power);
    let of_large = ((1.0 - power) * share).copysign(x);
    let value = if x.abs() < SMALL { of_small } else { of_large };
    (value, 4.0 * power * share * share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::element::narrow;

    fn error(value: f32, truth: f64) -> f64 {
        (f64::from(value) - truth).abs() / truth
    }

    #[test]
    fn exponentials_are_close_to_the_truth() {
        for step in 0..870_000_u32 {
            let x = narrow(-1e-4 * f64::from(step));
            assert!(error(exp(x), f64::from(x).exp()) < 2e-7, "e^{x} is not {}", exp(x));
        }
    }

    #[test]
    fn sigmoids_are_close_to_the_truth() {
        for step in -80_000..80_000_i32 {
            let x = narrow(1e-3 * f64::from(step));
            let truth = 1.0 / (1.0 + f64::from(-x).exp());
            let (value, derivative) = sigmoid(x);
            assert!(error(value, truth) < 4e-7, "sigmoid({x}) is not {value}");
            let truth = truth / (1.0 + f64::from(x).exp());
            assert!(error(derivative, truth) < 6e-7, "sigmoid'({x}) is not {derivative}");
        }
    }

    #[test]
    fn hyperbolic_tangents_are_close_to_the_truth() {
        for step in 1..200_000_u32 {
            let x = narrow(1e-4 * f64::from(step));
            let truth = f64::from(x).tanh();
            let (value, derivative) = tanh(x);
            assert!(error(value, truth) < 4e-7, "tanh({x}) is not {value}");
            let truth = f64::from(x).cosh().powi(-2);
            assert!(error(derivative, truth) < 4e-7, "tanh'({x}) is not {derivative}");
            assert_eq!(tanh(-x), (-value, derivative));
        }
        assert_eq!([tanh(0.0), tanh(-0.0)], [(0.0, 1.0); 2]);
        let ends = [f32::INFINITY, f32::NEG_INFINITY, 1e30].map(tanh);
        assert_eq!(ends, [(1.0, 0.0), (-1.0, 0.0), (1.0, 0.0)]);
        assert!(tanh(f32::NAN).0.is_nan() && tanh(f32::NAN).1.is_nan());
    }

    #[test]
    fn the_ends_of_the_range() {
        assert_eq!([exp(0.0), exp(-0.0), exp(f32::NEG_INFINITY), exp(-1e30)], [1.0, 1.0, 0.0, 0.0]);
        assert!(exp(f32::NAN).is_nan() && sigmoid(f32::NAN).0.is_nan());
        assert_eq!([sigmoid(f32::INFINITY), sigmoid(f32::NEG_INFINITY)], [(1.0, 0.0), (0.0, 0.0)]);
    }
}
