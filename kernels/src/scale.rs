//! Divisions by one f64, computed in f64. The last division of a step uses them.

use crate::convert::BLOCK;
use crate::divisor::exact_reciprocal;
use crate::map::{MultiplyF64, QuotientF64, in_place, replace};
use crate::round::nearest_f32;
use crate::simd::vectorized;

/// `target = source / divisor`, divided in f64 and rounded to f32 once.
///
/// The results are those of IEEE division for every divisor, also for zero, infinity and NaN.
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn scaled_copy(target: &mut [f32], source: &[f32], divisor: f64) {
    assert_eq!(target.len(), source.len(), "scaled_copy: lengths of target and source differ");
    if let Some(reciprocal) = exact_reciprocal(divisor) {
        return replace(target, source, MultiplyF64(reciprocal));
    }
    let Some(bracket) = Bracket::of(divisor) else {
        return replace(target, source, QuotientF64(divisor));
    };
    for (target, source) in target.chunks_mut(BLOCK).zip(source.chunks(BLOCK)) {
        if bracket.divide(target, source) == Certainty::InDoubt {
            replace(target, source, QuotientF64(divisor));
        }
    }
}

/// `target = target / divisor`, divided in f64 and rounded to f32 once.
///
/// The results are those of IEEE division for every divisor, also for zero, infinity and NaN.
pub fn divide_in_place(target: &mut [f32], divisor: f64) {
    match exact_reciprocal(divisor) {
        Some(reciprocal) => in_place(target, MultiplyF64(reciprocal)),
        None => in_place(target, QuotientF64(divisor)),
    }
}

/// Two numbers between which the reciprocal of a divisor lies.
///
/// Two multiplications take less time than a division. Rounding is monotone: if the two products
/// round to the same f32, so does the quotient, which lies between them.
#[derive(Debug, Clone, Copy)]
struct Bracket {
    below: f64,
    above: f64,
}

impl Bracket {
    /// The neighbors of the f64 nearest to the reciprocal, whose error is at most half a unit in
    /// the last place.
    fn of(divisor: f64) -> Option<Self> {
        let reciprocal = divisor.recip();
        let bracket = Self { below: reciprocal.next_down(), above: reciprocal.next_up() };
        (divisor.is_normal() && reciprocal.is_normal()).then_some(bracket)
    }

    /// Multiplies by both numbers, and writes one of the products.
    fn divide(self, target: &mut [f32], source: &[f32]) -> Certainty {
        let Self { below, above } = self;
        vectorized(
            #[inline(always)]
            move || {
                let mut differing = 0;
                for (target, &source) in target.iter_mut().zip(source) {
                    let source = f64::from(source);
                    *target = nearest_f32(source * below);
                    differing |= target.to_bits() ^ nearest_f32(source * above).to_bits();
                }
                if differing == 0 { Certainty::Exact } else { Certainty::InDoubt }
            },
        )
    }
}

/// Whether products are known to be the quotients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Certainty {
    Exact,
    /// The products differ for some element. That happens about once in a hundred million elements,
    /// or among the smallest f32.
    InDoubt,
}

#[cfg(test)]
mod tests;
