//! Exponentials that the compiler can vectorize, with the same bits on all machines.

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
