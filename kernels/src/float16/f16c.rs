//! Conversions of f16 by the instructions of x86.
//!
//! An instruction converts eight elements. The remaining elements at the end go through the same
//! functions as on other machines. The instructions round to nearest with ties to even, whatever
//! the thread's rounding mode.

use std::arch::x86_64::{_MM_FROUND_TO_NEAREST_INT, _mm256_cvtph_ps, _mm256_cvtps_ph};

use bytemuck::must_cast;

use crate::round::{from_f16_bits, round_f16, to_f16_bits};

#[target_feature(enable = "avx2,f16c")]
pub(super) fn widen(target: &mut [f32], source: &[u16]) {
    let (target, target_rest) = target.as_chunks_mut();
    let (source, source_rest) = source.as_chunks();
    for (target, source) in target.iter_mut().zip(source) {
        *target = widen_row(*source);
    }
    for (target, source) in target_rest.iter_mut().zip(source_rest) {
        *target = from_f16_bits(*source);
    }
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn narrow(target: &mut [u16], source: &[f32]) {
    let (target, target_rest) = target.as_chunks_mut();
    let (source, source_rest) = source.as_chunks();
    for (target, source) in target.iter_mut().zip(source) {
        *target = narrow_row(*source);
    }
    for (target, source) in target_rest.iter_mut().zip(source_rest) {
        *target = to_f16_bits(*source);
    }
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn round(values: &mut [f32]) {
    let (rows, rest) = values.as_chunks_mut();
    for row in rows {
        *row = widen_row(narrow_row(*row));
    }
    for value in rest {
        *value = round_f16(*value);
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_row(source: [u16; 8]) -> [f32; 8] {
    must_cast(_mm256_cvtph_ps(must_cast(source)))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_row(source: [f32; 8]) -> [u16; 8] {
    must_cast(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(must_cast(source)))
}
