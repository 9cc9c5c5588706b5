//! Divisions by one f64, in f64: what the last division of a step uses.

use crate::divisor::exact_reciprocal;
use crate::map::{MultiplyF64, QuotientF64, in_place, replace};

/// `target = source / divisor`, divided in f64 and rounded to f32 once.
///
/// A divisor of zero, or one that is not finite, gives what IEEE division gives.
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn scaled_copy(target: &mut [f32], source: &[f32], divisor: f64) {
    assert_eq!(target.len(), source.len(), "scaled_copy: lengths of target and source");
    match exact_reciprocal(divisor) {
        Some(reciprocal) => replace(target, source, MultiplyF64(reciprocal)),
        None => replace(target, source, QuotientF64(divisor)),
    }
}

/// `target = target / divisor`, divided in f64 and rounded to f32 once.
///
/// A divisor of zero, or one that is not finite, gives what IEEE division gives.
pub fn divide_in_place(target: &mut [f32], divisor: f64) {
    match exact_reciprocal(divisor) {
        Some(reciprocal) => in_place(target, MultiplyF64(reciprocal)),
        None => in_place(target, QuotientF64(divisor)),
    }
}

#[cfg(test)]
mod tests;
