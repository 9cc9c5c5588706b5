//! The start of a backward: the part of the seed that enters candle's graph, and the rest.

use candle_core::{DType, Result, Tensor};
use hsdp::{LossSum, Seed};

use crate::convert::is_in_16_bits;

/// Form of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LossForm {
    /// The mean over items.
    Mean,
    /// The sum over items.
    Sum,
}

impl LossForm {
    /// Returns the loss with its items, of total weight `weight`.
    pub(super) fn loss(self, value: f64, weight: u64) -> LossSum {
        match self {
            Self::Mean => LossSum::from_mean(value, weight),
            Self::Sum => LossSum::new(value, weight),
        }
    }
}

/// A seed as two factors. candle keeps the gradient of a tensor in the tensor's dtype, so a graph
/// with 16-bit tensors would round a seed to 8 or 11 bits, and with it all gradients alike. Only a
/// power of two enters such a graph. The rest multiplies the gradients of parameters in f32. For a
/// mean the power is that of the loss scale alone, because f16 cannot hold the ratio of any two
/// weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Start {
    /// Factor of the loss.
    pub(super) in_graph: f64,
    /// Factor of the gradients of parameters.
    pub(super) outside: f32,
}

impl Start {
    /// Start of the backward of a loss that has no weight. Its gradients are dropped, but they are
    /// numbers if the loss is one.
    pub(super) const WITHOUT_WEIGHT: Self = Self { in_graph: 1.0, outside: 1.0 };

    /// Splits the seed of a loss of dtype `loss`. `narrowest` is the narrowest dtype in its graph.
    /// The seed is above 0.
    pub(super) fn of(seed: Seed, form: LossForm, [loss, narrowest]: [DType; 2]) -> Self {
        let natural = match form {
            LossForm::Mean => seed.loss_scale(),
            LossForm::Sum => seed.value(),
        };
        Self::split(seed.value(), natural, [loss, narrowest])
    }

    /// Splits a seed. The factor in a graph of 16 bits is the largest power of two below `natural`.
    fn split(seed: f64, natural: f64, [loss, narrowest]: [DType; 2]) -> Self {
        if !(is_in_16_bits(loss) || is_in_16_bits(narrowest)) || !natural.is_normal() {
            return Self { in_graph: seed, outside: 1.0 };
        }
        let in_graph = power_of_two_below(natural);
        let in_graph = match loss {
            // The gradient of the loss itself must be a normal number of f16.
            DType::F16 => in_graph.clamp(2_f64.powi(-14), 2_f64.powi(15)),
            _ => in_graph,
        };
        #[expect(clippy::cast_possible_truncation, reason = "the one rounding of the seed, to f32")]
        let outside = (seed / in_graph) as f32;
        Self { in_graph, outside }
    }

    /// Returns the scalar to run candle's backward on.
    pub(super) fn scaled(self, loss: &Tensor) -> Result<Tensor> {
        match loss.dtype() {
            DType::F64 => loss * self.in_graph,
            _ => loss.to_dtype(DType::F32)? * self.in_graph,
        }
    }

    /// Divides the gradient of a variable by the factor of the loss, with one rounding.
    pub(super) fn unscaled(self, gradient: &Tensor) -> Result<Tensor> {
        let wide = match gradient.dtype() {
            DType::F64 => gradient.clone(),
            _ => gradient.to_dtype(DType::F32)?,
        };
        (wide / self.in_graph)?.to_dtype(gradient.dtype())
    }
}

/// Clears the mantissa of a normal number above 0.
fn power_of_two_below(number: f64) -> f64 {
    f64::from_bits(number.to_bits() & !((1 << 52) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_in_f32_take_the_whole_seed() {
        let start = Start::split(1003.0, 1.0, [DType::F32, DType::F32]);
        assert_eq!(start, Start { in_graph: 1003.0, outside: 1.0 });
        let start = Start::split(0.3, 0.3, [DType::F64, DType::F32]);
        assert_eq!(start, Start { in_graph: 0.3, outside: 1.0 });
    }

    #[test]
    fn a_power_of_two_enters_graphs_in_16_bits() {
        for dtypes in [
            [DType::BF16, DType::BF16],
            [DType::F32, DType::BF16],
            [DType::F32, DType::F16],
            [DType::BF16, DType::F32],
        ] {
            let of_sum = Start::split(1003.0 * 65536.0, 1003.0 * 65536.0, dtypes);
            assert_eq!(of_sum, Start { in_graph: 512.0 * 65536.0, outside: 1003.0 / 512.0 });
            let of_mean = Start::split(1003.0 * 65536.0, 65536.0, dtypes);
            assert_eq!(of_mean, Start { in_graph: 65536.0, outside: 1003.0 });
            let start = Start::split(0.125, 0.125, dtypes);
            assert_eq!(start, Start { in_graph: 0.125, outside: 1.0 });
        }
    }

    #[test]
    fn the_gradient_of_a_loss_in_f16_fits_f16() {
        let of = |seed| Start::split(seed, seed, [DType::F16, DType::F16]);
        assert_eq!(of(3.0), Start { in_graph: 2.0, outside: 1.5 });
        let large = 2_f64.powi(24);
        assert_eq!(of(large * 3.0), Start { in_graph: 32768.0, outside: 1536.0 });
        let small = of(2_f64.powi(-20) * 1.25);
        assert_eq!(small, Start { in_graph: 2_f64.powi(-14), outside: 1.25 / 64.0 });
    }
}
