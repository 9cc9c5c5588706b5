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
use crate::simd::{Width, vectorized, vectorized_to};

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
    convert(Width::Eight, target, source, from_f16_bits);
}

/// Copies f32 into f16, rounding. Both have one length.
pub(crate) fn narrow_f16(target: &mut [f16], source: &[f32]) {
    let target = cast_slice_mut(target);
    #[cfg(target_arch = "x86_64")]
    if has_f16c() {
        // SAFETY: K-2, the condition saw F16C on this machine.
        return unsafe { f16c::narrow(target, source) };
    }
    convert(Width::Eight, target, source, to_f16_bits);
}

/// Rounds f32 to the nearest f16, in place.
pub(crate) fn round_to_f16(values: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if has_f16c() {
        // SAFETY: K-2, the condition saw F16C on this machine.
        return unsafe { f16c::round(values) };
    }
    vectorized(
        #[inline(always)]
        move || {
            for value in values {
                *value = round_f16(*value);
            }
        },
    );
}

/// Copies bf16 into f32. Both have one length.
pub(crate) fn widen_bf16(target: &mut [f32], source: &[bf16]) {
    convert(Width::Eight, target, cast_slice(source), from_bf16_bits);
}

/// Copies f32 into bf16, rounding. Both have one length.
pub(crate) fn narrow_bf16(target: &mut [bf16], source: &[f32]) {
    convert(Width::Sixteen, cast_slice_mut(target), source, to_bf16_bits);
}

/// Converts each element. `element` is a function of `round`, which is always inlined.
fn convert<T, S: Copy>(width: Width, target: &mut [T], source: &[S], element: impl Fn(S) -> T) {
    vectorized_to(
        width,
        #[inline(always)]
        move || {
            for (target, &source) in target.iter_mut().zip(source) {
                *target = element(source);
            }
        },
    );
}

#[cfg(test)]
mod tests;
