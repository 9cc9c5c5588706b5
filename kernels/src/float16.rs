//! Conversions of slices between f32 and the 16-bit floats.
//!
//! The conversions of bf16 are a few integer operations, which the compiler vectorizes. Those of
//! f16 take many operations. x86 has instructions for them (F16C), which the compiler never
//! chooses. With these instructions a conversion is as fast as a copy. (`half` uses them too, but
//! behind a call for every eight elements, which makes it slower than memory.)

use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};

use crate::round::{from_bf16_bits, from_f16_bits, round_f16, to_bf16_bits, to_f16_bits};
#[cfg(target_arch = "x86_64")]
use crate::simd::has_f16c;
use crate::simd::{Kernel, dispatch};

#[cfg(target_arch = "x86_64")]
mod f16c;

/// Copies f16 into f32. Both have one length.
pub(crate) fn widen_f16(target: &mut [f32], source: &[f16]) {
    let source = cast_slice(source);
    #[cfg(target_arch = "x86_64")]
    if has_f16c() {
        // SAFETY: K-2, the condition saw F16C on this machine.
        return unsafe { f16c::widen(target, source) };
    }
    dispatch(Convert { target, source, element: from_f16_bits });
}

/// Copies f32 into f16, rounding. Both have one length.
pub(crate) fn narrow_f16(target: &mut [f16], source: &[f32]) {
    let target = cast_slice_mut(target);
    #[cfg(target_arch = "x86_64")]
    if has_f16c() {
        // SAFETY: K-2, the condition saw F16C on this machine.
        return unsafe { f16c::narrow(target, source) };
    }
    dispatch(Convert { target, source, element: to_f16_bits });
}

/// Rounds f32 to the nearest f16, in place.
pub(crate) fn round_to_f16(values: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if has_f16c() {
        // SAFETY: K-2, the condition saw F16C on this machine.
        return unsafe { f16c::round(values) };
    }
    dispatch(RoundF16 { values });
}

/// Copies bf16 into f32. Both have one length.
pub(crate) fn widen_bf16(target: &mut [f32], source: &[bf16]) {
    dispatch(Convert { target, source: cast_slice(source), element: from_bf16_bits });
}

/// Copies f32 into bf16, rounding. Both have one length.
pub(crate) fn narrow_bf16(target: &mut [bf16], source: &[f32]) {
    dispatch(Convert { target: cast_slice_mut(target), source, element: to_bf16_bits });
}

struct Convert<'a, T, S, F> {
    target: &'a mut [T],
    source: &'a [S],
    /// The conversion of one element: a function of `round`, which is always inlined.
    element: F,
}

impl<T, S: Copy, F: Fn(S) -> T> Kernel for Convert<'_, T, S, F> {
    #[inline(always)]
    fn run(self) {
        for (target, &source) in self.target.iter_mut().zip(self.source) {
            *target = (self.element)(source);
        }
    }
}

struct RoundF16<'a> {
    values: &'a mut [f32],
}

impl Kernel for RoundF16<'_> {
    #[inline(always)]
    fn run(self) {
        for value in self.values {
            *value = round_f16(*value);
        }
    }
}

#[cfg(test)]
mod tests;
