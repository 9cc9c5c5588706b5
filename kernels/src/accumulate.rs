//! The arithmetic steps of a reduction: packing a contribution for the wire, adding it to a sum,
//! and taking the finished sum into its target.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::convert::{BLOCK, cast, unpack};
use crate::divisor::{Divisor, Scale};
use crate::float16::round_to_f16;
use crate::map::{self, Map, Multiply, RoundBF16, Then};
use crate::values::{Values, ValuesMut};
use crate::wire::Wire;

/// Whether a result replaces the elements of its target or is added to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fold {
    /// The target is overwritten, and never read.
    Replace,
    /// The result is added to the target, in f32.
    Add,
}

/// The scaling of a reduction of gradients: each contribution is divided by `pre` and rounded to
/// `wire`, and the f32 sum is divided by `post`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scaling {
    /// The dtype to which contributions are rounded.
    pub wire: Wire,
    /// The divisor of each contribution, before it is rounded.
    pub pre: Divisor,
    /// The divisor of the finished sum.
    pub post: Divisor,
}

impl Scaling {
    /// Scaling that rounds contributions to `wire` and divides nothing.
    pub const fn on(wire: Wire) -> Self {
        Self { wire, pre: Divisor::ONE, post: Divisor::ONE }
    }
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wire {}, / {} / {}", self.wire, self.pre.value(), self.post.value())
    }
}

/// Packs a gradient for the wire: `target = round(source / pre)`, divided in f32 and rounded once.
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn pack(mut target: ValuesMut<'_>, source: Values<'_>, pre: Divisor) {
    assert_eq!(target.len(), source.len(), "pack: lengths of target and source differ");
    match (&mut target, source, pre.scale()) {
        (_, Values::F32(source), Scale::None) => return cast(target, source),
        (ValuesMut::BF16(target), Values::F32(source), Scale::Multiply(scale)) => {
            return map::replace_bf16(target, source, scale);
        }
        (ValuesMut::BF16(target), Values::F32(source), Scale::Divide(scale)) => {
            return map::replace_bf16(target, source, scale);
        }
        _ => (),
    }
    in_divided_blocks(source, pre, |range, block| {
        cast(target.reborrow().slice(range), block);
    });
}

/// Adds one member's gradient to a sum: `sum = round(values / pre)` or `sum += round(values /
/// pre)`.
///
/// `values` are divided by `pre` in f32, rounded to the dtype of `wire`, and folded into `sum` in
/// f32. If members contribute in a fixed order, every run gives the same bits: element `i` of the
/// sum depends on the elements `i` alone, and not on how a range was cut into calls.
///
/// # Panics
///
/// If `sum` and `values` differ in length.
pub fn contribute(sum: &mut [f32], values: Values<'_>, pre: Divisor, wire: Wire, fold: Fold) {
    assert_eq!(sum.len(), values.len(), "contribute: lengths of sum and values differ");
    let wire = lossless(values, pre, wire);
    match (values, wire) {
        (Values::F32(values), Wire::F32) => {
            divided(FoldTarget { elements: sum, fold }, values, pre, Rounding::None);
        }
        (Values::F32(values), Wire::BF16) => {
            divided(FoldTarget { elements: sum, fold }, values, pre, Rounding::BF16);
        }
        _ => in_divided_blocks(values, pre, |range, block| {
            let rounding = match wire {
                Wire::F32 => Rounding::None,
                Wire::BF16 => Rounding::BF16,
                Wire::F16 => {
                    round_to_f16(block);
                    Rounding::None
                }
            };
            let target = FoldTarget { elements: &mut sum[range], fold };
            divided(target, block, Divisor::ONE, rounding);
        }),
    }
}

/// Takes a finished sum into its target: `target = sum / post` or `target += sum / post`.
///
/// # Panics
///
/// If `target` and `sum` differ in length.
pub fn settle(target: &mut [f32], sum: &[f32], post: Divisor, fold: Fold) {
    assert_eq!(target.len(), sum.len(), "settle: lengths of target and sum differ");
    divided(FoldTarget { elements: target, fold }, sum, post, Rounding::None);
}

/// The wire that is left to round to: `Wire::F32` where undivided values have the dtype of `wire`
/// already.
pub(crate) fn lossless(values: Values<'_>, pre: Divisor, wire: Wire) -> Wire {
    if pre.is_one() && values.dtype() == wire.dtype() { Wire::F32 } else { wire }
}

/// Divides in place, in f32.
pub(crate) fn divide(values: &mut [f32], divisor: Divisor) {
    match divisor.scale() {
        Scale::None => (),
        Scale::Multiply(scale) => map::in_place(values, scale),
        Scale::Divide(scale) => map::in_place(values, scale),
    }
}

/// Calls `visit` with `values / divisor` in f32, block after block, each with its range. The blocks
/// are copies that `visit` may change.
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

/// The roundings that can be done in the loop that divides and adds.
#[derive(Debug, Clone, Copy)]
enum Rounding {
    None,
    BF16,
}

/// The elements that a result goes to, and whether it replaces them.
struct FoldTarget<'a> {
    elements: &'a mut [f32],
    fold: Fold,
}

fn divided(target: FoldTarget<'_>, values: &[f32], pre: Divisor, rounding: Rounding) {
    match (pre.scale(), rounding) {
        (Scale::None, Rounding::None) => folded(target, values, Multiply(1.0)),
        (Scale::None, Rounding::BF16) => folded(target, values, RoundBF16),
        (Scale::Multiply(scale), _) => rounded(target, values, scale, rounding),
        (Scale::Divide(scale), _) => rounded(target, values, scale, rounding),
    }
}

fn rounded<S: Map>(target: FoldTarget<'_>, values: &[f32], scale: S, rounding: Rounding) {
    match rounding {
        Rounding::None => folded(target, values, scale),
        Rounding::BF16 => folded(target, values, Then(scale, RoundBF16)),
    }
}

fn folded<M: Map>(target: FoldTarget<'_>, values: &[f32], map: M) {
    match target.fold {
        Fold::Replace => map::replace(target.elements, values, map),
        Fold::Add => map::add(target.elements, values, map),
    }
}

#[cfg(test)]
mod tests;
