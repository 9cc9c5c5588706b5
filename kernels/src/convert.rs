//! Copies between f32 and the 16-bit dtypes.

use std::borrow::Cow;

use crate::float16::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use crate::values::{Values, ValuesMut};

/// The number of f32 that a kernel holds on its stack between two passes: 4 KiB, well within the
/// first-level cache.
pub(crate) const BLOCK: usize = 1024;

/// Copies f32 elements into a buffer of f32, f16 or bf16. Each element is rounded to nearest, ties
/// to even.
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn cast(target: ValuesMut<'_>, source: &[f32]) {
    assert_eq!(target.len(), source.len(), "cast: lengths of target and source differ");
    match target {
        ValuesMut::F32(target) => target.copy_from_slice(source),
        ValuesMut::F16(target) => narrow_f16(target, source),
        ValuesMut::BF16(target) => narrow_bf16(target, source),
    }
}

/// Copies elements of f32, f16 or bf16 into f32. The conversion is exact.
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn unpack(target: &mut [f32], source: Values<'_>) {
    assert_eq!(target.len(), source.len(), "unpack: lengths of target and source differ");
    match source {
        Values::F32(source) => target.copy_from_slice(source),
        Values::F16(source) => widen_f16(target, source),
        Values::BF16(source) => widen_bf16(target, source),
    }
}

impl<'a> Values<'a> {
    /// Returns the elements in f32: themselves, or a copy. The conversion is exact.
    pub fn wide(self) -> Cow<'a, [f32]> {
        match self {
            Self::F32(values) => Cow::Borrowed(values),
            values => Cow::Owned(values.to_f32()),
        }
    }

    /// Copies the elements into a new vector of f32. The conversion is exact.
    pub fn to_f32(self) -> Vec<f32> {
        let mut full = vec![0.0; self.len()];
        unpack(&mut full, self);
        full
    }
}

#[cfg(test)]
mod tests;
