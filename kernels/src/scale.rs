//! Divisions by one f64, in f64: what the last division of a step uses.

use crate::convert::BLOCK;
use crate::divisor::exact_reciprocal;
use crate::map::{MultiplyF64, QuotientF64, in_place, replace};
use crate::round::nearest_f32;
use crate::simd::{Kernel, dispatch};

/// `target = source / divisor`, divided in f64 and rounded to f32 once.
///
/// A divisor of zero, or one that is not finite, gives what IEEE division gives.
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn scaled_copy(target: &mut [f32], source: &[f32], divisor: f64) {
    assert_eq!(target.len(), source.len(), "scaled_copy: lengths of target and source");
    if let Some(reciprocal) = exact_reciprocal(divisor) {
        return replace(target, source, MultiplyF64(reciprocal));
    }
    let Some(bracket) = Bracket::of(divisor) else {
        return replace(target, source, QuotientF64(divisor));
    };
    for (target, source) in target.chunks_mut(BLOCK).zip(source.chunks(BLOCK)) {
        let outcome = dispatch(Bracketed { target: &mut *target, source, bracket });
        if outcome == Outcome::InDoubt {
            replace(target, source, QuotientF64(divisor));
        }
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

/// Two numbers between which a divisor's reciprocal lies.
///
/// Multiplying by both takes less time than a division. Rounding never swaps two numbers: if the two products are the
/// same f32, so is the quotient, which lies between them.
#[derive(Debug, Clone, Copy)]
struct Bracket {
    below: f64,
    above: f64,
}

impl Bracket {
    /// The neighbours of the nearest f64, which is off by half a place at the most.
    fn of(divisor: f64) -> Option<Self> {
        let reciprocal = divisor.recip();
        let bracket = Self { below: reciprocal.next_down(), above: reciprocal.next_up() };
        (divisor.is_normal() && reciprocal.is_normal()).then_some(bracket)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Exact,
    /// The products differ somewhere: once in some hundred million elements, or among the least f32.
    InDoubt,
}

struct Bracketed<'a> {
    target: &'a mut [f32],
    source: &'a [f32],
    bracket: Bracket,
}

impl Kernel for Bracketed<'_> {
    type Output = Outcome;

    #[inline(always)]
    fn run(self) -> Outcome {
        let Bracket { below, above } = self.bracket;
        let mut differing = 0;
        for (target, &source) in self.target.iter_mut().zip(self.source) {
            let source = f64::from(source);
            *target = nearest_f32(source * below);
            differing |= target.to_bits() ^ nearest_f32(source * above).to_bits();
        }
        if differing == 0 { Outcome::Exact } else { Outcome::InDoubt }
    }
}

#[cfg(test)]
mod tests;
