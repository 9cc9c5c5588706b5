//! Loops that apply a function to each element, compiled for each combination of functions.

use crate::round::{nearest_f32, round_bf16};
use crate::simd::{Kernel, dispatch};

/// A function of one element.
pub(crate) trait Map: Copy {
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

/// `target = map(source)`. Both have one length.
pub(crate) fn replace<M: Map>(target: &mut [f32], source: &[f32], map: M) {
    dispatch(Replace { target, source, map });
}

/// `target = target + map(source)`. Both have one length.
pub(crate) fn add<M: Map>(target: &mut [f32], source: &[f32], map: M) {
    dispatch(Add { target, source, map });
}

/// `target = map(target)`.
pub(crate) fn in_place<M: Map>(target: &mut [f32], map: M) {
    dispatch(InPlace { target, map });
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
    #[inline(always)]
    fn apply(self, value: f32) -> f32 {
        round_bf16(value)
    }
}

impl<A: Map, B: Map> Map for Then<A, B> {
    #[inline(always)]
    fn apply(self, value: f32) -> f32 {
        self.1.apply(self.0.apply(value))
    }
}

struct Replace<'a, M> {
    target: &'a mut [f32],
    source: &'a [f32],
    map: M,
}

impl<M: Map> Kernel for Replace<'_, M> {
    #[inline(always)]
    fn run(self) {
        for (target, &source) in self.target.iter_mut().zip(self.source) {
            *target = self.map.apply(source);
        }
    }
}

struct Add<'a, M> {
    target: &'a mut [f32],
    source: &'a [f32],
    map: M,
}

impl<M: Map> Kernel for Add<'_, M> {
    #[inline(always)]
    fn run(self) {
        for (target, &source) in self.target.iter_mut().zip(self.source) {
            *target += self.map.apply(source);
        }
    }
}

struct InPlace<'a, M> {
    target: &'a mut [f32],
    map: M,
}

impl<M: Map> Kernel for InPlace<'_, M> {
    #[inline(always)]
    fn run(self) {
        for target in self.target {
            *target = self.map.apply(*target);
        }
    }
}
