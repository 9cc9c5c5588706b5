//! Divisions by one f64, computed in f64. The last division of a step uses them.

use crate::convert::BLOCK;
use crate::divisor::exact_reciprocal;
use crate::map::{MultiplyF64, QuotientF64, in_place, replace};
use crate::round::nearest_f32;
use crate::simd::{Kernel, dispatch};

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
        let outcome = dispatch(Bracketed { target: &mut *target, source, bracket });
        if outcome == Certainty::InDoubt {
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
}

/// Whether products are known to be the quotients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Certainty {
    Exact,
    /// The products differ for some element. That happens about once in a hundred million elements,
    /// or among the smallest f32.
    InDoubt,
}

struct Bracketed<'a> {
    target: &'a mut [f32],
    source: &'a [f32],
    bracket: Bracket,
}

impl Kernel<Certainty> for Bracketed<'_> {
    #[inline(always)]
    fn run(self) -> Certainty {
        let Bracket { below, above } = self.bracket;
        let mut differing = 0;
        for (target, &source) in self.target.iter_mut().zip(self.source) {
            let source = f64::from(source);
            *target = nearest_f32(source * below);
            differing |= target.to_bits() ^ nearest_f32(source * above).to_bits();
        }
        if differing == 0 { Certainty::Exact } else { Certainty::InDoubt }
    }
}

#[cfg(test)]
mod tests;
