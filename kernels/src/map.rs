//! Loops that apply a function to each element, compiled for each combination of functions.

use bytemuck::cast_slice_mut;
use half::bf16;

use crate::round::{nearest_f32, round_bf16, to_bf16_bits};
use crate::simd::{Width, vectorized_to};

/// A function of one element.
pub(crate) trait Map: Copy {
    /// The greatest width of vectors that makes loops with this function faster.
    const WIDTH: Width = Width::Eight;

    /// The result for `value`. Always inlined into the loop.
    fn apply(self, value: f32) -> f32;
}

/// Multiplies by a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Multiply(pub(crate) f32);

/// Divides by a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Quotient(pub(crate) f32);

/// Multiplies by a number, in f64.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MultiplyF64(pub(crate) f64);

/// Divides by a number, in f64.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuotientF64(pub(crate) f64);

/// Rounds to bf16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RoundBF16;

/// Applies one map after another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Then<A, B>(pub(crate) A, pub(crate) B);

/// Computes `target = map(source)`. Both have one length.
pub(crate) fn replace<M: Map>(target: &mut [f32], source: &[f32], map: M) {
    vectorized_to(
        M::WIDTH,
        #[inline(always)]
        move || {
            for (target, &source) in target.iter_mut().zip(source) {
                *target = map.apply(source);
            }
        },
    );
}

/// Computes `target = map(source)`, rounded to bf16. Both have one length.
pub(crate) fn replace_bf16<M: Map>(target: &mut [bf16], source: &[f32], map: M) {
    let target: &mut [u16] = cast_slice_mut(target);
    vectorized_to(
        RoundBF16::WIDTH,
        #[inline(always)]
        move || {
            for (target, &source) in target.iter_mut().zip(source) {
                *target = to_bf16_bits(map.apply(source));
            }
        },
    );
}

/// `target = target + map(source)`. Both have one length.
pub(crate) fn add<M: Map>(target: &mut [f32], source: &[f32], map: M) {
    vectorized_to(
        M::WIDTH,
        #[inline(always)]
        move || {
            for (target, &source) in target.iter_mut().zip(source) {
                *target += map.apply(source);
            }
        },
    );
}

/// `target = map(target)`.
pub(crate) fn in_place<M: Map>(target: &mut [f32], map: M) {
    vectorized_to(
        M::WIDTH,
        #[inline(always)]
        move || {
            for target in target {
                *target = map.apply(*target);
            }
        },
    );
}

impl Map for Multiply {
    #[inline(always)]
    fn apply(self, value: f32) -> f32 {
        value * self.0
    }
}

impl Map for Quotient {
    #[inline(always)]
    fn apply(self, value: f32) -> f32 {
        value / self.0
    }
}

impl Map for MultiplyF64 {
    #[inline(always)]
    fn apply(self, value: f32) -> f32 {
        nearest_f32(f64::from(value) * self.0)
    }
}

impl Map for QuotientF64 {
    #[inline(always)]
    fn apply(self, value: f32) -> f32 {
        nearest_f32(f64::from(value) / self.0)
    }
}

impl Map for RoundBF16 {
    const WIDTH: Width = Width::Sixteen;

    #[inline(always)]
    fn apply(self, value: f32) -> f32 {
        round_bf16(value)
    }
}

impl<A: Map, B: Map> Map for Then<A, B> {
    const WIDTH: Width = match (A::WIDTH, B::WIDTH) {
        (Width::Eight, Width::Eight) => Width::Eight,
        _ => Width::Sixteen,
    };

    #[inline(always)]
    fn apply(self, value: f32) -> f32 {
        self.1.apply(self.0.apply(value))
    }
}
