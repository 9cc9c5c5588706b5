//! Copies between f32 and the 16-bit dtypes.

use std::ops::Range;

use crate::accumulate::{Fold, divide, settle};
use crate::divisor::Divisor;
use crate::float16::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use crate::values::{Values, ValuesMut};

/// The number of f32 that a kernel holds on its stack between two passes: 4 KiB, well within the first-level cache.
pub(crate) const BLOCK: usize = 1024;

/// Copies f32 elements into a buffer of f32, f16 or bf16. Each element is rounded to nearest, ties to even.
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

/// Packs a gradient for the wire: `target = round(source / pre)`, divided in f32 and rounded once.
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn pack(mut target: ValuesMut<'_>, source: Values<'_>, pre: Divisor) {
    assert_eq!(target.len(), source.len(), "pack: lengths of target and source differ");
    if pre.is_one()
        && let Values::F32(source) = source
    {
        return cast(target, source);
    }
    in_divided_blocks(source, pre, |range, block| {
        cast(target.reborrow().slice(range), block);
    });
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

/// Calls `visit` with `values / divisor` in f32, block after block, each with its range. The blocks are copies that
/// `visit` may change.
pub(crate) fn in_divided_blocks(
    values: Values<'_>,
    divisor: Divisor,
    mut visit: impl FnMut(Range<usize>, &mut [f32]),
) {
    let mut block = [0.0; BLOCK];
    for start in (0..values.len()).step_by(BLOCK) {
        let range = start..values.len().min(start + BLOCK);
        let block = &mut block[..range.len()];
        match values.slice(range.clone()) {
            Values::F32(values) => settle(block, values, divisor, Fold::Replace),
            values => {
                unpack(block, values);
                divide(block, divisor);
            }
        }
        visit(range, block);
    }
}

#[cfg(test)]
mod tests;
