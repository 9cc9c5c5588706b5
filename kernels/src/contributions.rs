//! Reductions of several members in one pass: every gradient is read once, and the partial is read
//! and written once.
//!
//! [`contribute`] and [`settle`] make a pass over the sum for each member, and [`first_non_finite`]
//! makes another. If the sum stays in the first-level cache, these passes cost no memory traffic.
//! But they cost instructions, which limit the speed on a 16-bit wire. Here divisions, roundings,
//! the sum and the check stay in registers. More members are read a few at a time: a pass over a
//! short part of one gradient ends before the prefetcher of the machine has found a pattern, and
//! several such parts at once keep memory busy.

use bytemuck::cast_slice;

use crate::accumulate::{Fold, Scaling, contribute, lossless, settle};
use crate::convert::BLOCK;
use crate::divisor::{Divisor, Scale};
use crate::inspect::{first_non_finite, non_finite_bits};
use crate::map::{Map, Multiply, RoundBF16, Then};
use crate::round::from_bf16_bits;
use crate::simd::vectorized_to;
use crate::values::Values;
use crate::wire::Wire;

/// The number of members that one pass reads at once. With more members, there are several passes
/// over a block in the first-level cache.
pub const FUSED: usize = 4;

/// Sums the members' contributions, takes the sum into the target, and returns the index of the
/// first element of the target that is infinite or NaN.
///
/// The bits are those of [`contribute`] for each member in order, then [`settle`] with `fold`, then
/// [`first_non_finite`] of the target. (Where two NaN are added, the payload of either may remain.)
///
/// The call makes one pass for up to [`FUSED`] members with gradients of one dtype, f32 or bf16, a
/// wire of f32 or bf16, and a `pre` that is a power of two. In other cases it works on blocks in
/// the first-level cache. Without members the sum is zeros.
///
/// # Panics
///
/// If a contribution has another length than `target`.
pub fn sum_contributions(
    target: &mut [f32],
    contributions: &[Values<'_>],
    scaling: Scaling,
    fold: Fold,
) -> Option<usize> {
    for values in contributions {
        assert_eq!(
            target.len(),
            values.len(),
            "sum contributions: lengths of target and contribution differ"
        );
    }
    let finish = FinalSum { target: &mut *target, post: scaling.post.scale(), fold };
    match by_dtype(finish, contributions, scaling) {
        Some(Finiteness::AllFinite) => None,
        Some(Finiteness::Suspect) => first_non_finite(target),
        None => in_blocks(target, contributions, scaling, fold),
    }
}

/// Adds several members' gradients to a sum. With [`Fold::Replace`] the first of them replaces the
/// elements of `sum`.
///
/// The bits are those of [`contribute`] for each member in order. (Where two NaN are added, the
/// payload of either may remain.) The call makes one pass under the conditions of
/// [`sum_contributions`]. Without members `sum` is unchanged.
///
/// # Panics
///
/// If a contribution has another length than `sum`.
pub fn contribute_all(
    sum: &mut [f32],
    contributions: &[Values<'_>],
    pre: Divisor,
    wire: Wire,
    fold: Fold,
) {
    for values in contributions {
        assert_eq!(
            sum.len(),
            values.len(),
            "contribute all: lengths of sum and contribution differ"
        );
    }
    let scaling = Scaling { pre, ..Scaling::on(wire) };
    if by_dtype(Carried { sum: &mut *sum, fold }, contributions, scaling).is_some() {
        return;
    }
    for (member, values) in contributions.iter().enumerate() {
        let fold = if member == 0 { fold } else { Fold::Add };
        contribute(sum, *values, pre, wire, fold);
    }
}

/// The use of the sum of a pass.
trait Finish {
    /// The summary of the results that a pass returns.
    type Summary;

    /// Makes the pass. The contributions are the sources, all of one length, with `each` applied to
    /// their elements.
    fn pass<T: PassElement, M: Map, const N: usize>(
        self,
        sources: [&[T]; N],
        each: M,
    ) -> Self::Summary;
}

/// The sum is divided and taken into the target.
struct FinalSum<'a> {
    target: &'a mut [f32],
    post: Scale,
    fold: Fold,
}

/// The sum continues the sum of earlier members, or begins anew.
struct Carried<'a> {
    sum: &'a mut [f32],
    fold: Fold,
}

/// Whether all results of a pass are finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finiteness {
    AllFinite,
    Suspect,
}

/// The bits of a bf16.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct BF16(u16);

/// An element that a pass reads.
trait PassElement: Copy {
    /// The elements, if they are of this dtype.
    fn of(values: Values<'_>) -> Option<&[Self]>;

    /// The element in f32. Always inlined into the loop.
    fn widened(self) -> f32;
}

impl PassElement for f32 {
    fn of(values: Values<'_>) -> Option<&[Self]> {
        match values {
            Values::F32(values) => Some(values),
            _ => None,
        }
    }

    #[inline(always)]
    fn widened(self) -> f32 {
        self
    }
}

impl PassElement for BF16 {
    fn of(values: Values<'_>) -> Option<&[Self]> {
        match values {
            Values::BF16(values) => Some(cast_slice(values)),
            _ => None,
        }
    }

    #[inline(always)]
    fn widened(self) -> f32 {
        from_bf16_bits(self.0)
    }
}

/// Makes the pass for the dtype of the contributions; `None` where there is no pass for them.
fn by_dtype<F: Finish>(
    finish: F,
    contributions: &[Values<'_>],
    scaling: Scaling,
) -> Option<F::Summary> {
    match contributions {
        [Values::F32(_), ..] => by_members::<f32, F>(finish, contributions, scaling),
        [Values::BF16(_), ..] => by_members::<BF16, F>(finish, contributions, scaling),
        _ => None,
    }
}

fn by_members<T: PassElement, F: Finish>(
    finish: F,
    contributions: &[Values<'_>],
    scaling: Scaling,
) -> Option<F::Summary> {
    let wire = lossless(*contributions.first()?, scaling.pre, scaling.wire);
    let scaling = Scaling { wire, ..scaling };
    let of = |index: usize| T::of(contributions[index]);
    match contributions.len() {
        1 => by_wire(finish, [of(0)?], scaling),
        2 => by_wire(finish, [of(0)?, of(1)?], scaling),
        3 => by_wire(finish, [of(0)?, of(1)?, of(2)?], scaling),
        4 => by_wire(finish, [of(0)?, of(1)?, of(2)?, of(3)?], scaling),
        _ => None,
    }
}

fn by_wire<T: PassElement, F: Finish, const N: usize>(
    finish: F,
    sources: [&[T]; N],
    scaling: Scaling,
) -> Option<F::Summary> {
    match (scaling.wire, scaling.pre.scale()) {
        (Wire::F32, Scale::None) => Some(finish.pass(sources, Multiply(1.0))),
        (Wire::F32, Scale::Multiply(pre)) => Some(finish.pass(sources, pre)),
        (Wire::BF16, Scale::None) => Some(finish.pass(sources, RoundBF16)),
        (Wire::BF16, Scale::Multiply(pre)) => Some(finish.pass(sources, Then(pre, RoundBF16))),
        (_, Scale::Divide(_)) | (Wire::F16, _) => None,
    }
}

impl Finish for FinalSum<'_> {
    type Summary = Finiteness;

    fn pass<T: PassElement, M: Map, const N: usize>(
        self,
        sources: [&[T]; N],
        each: M,
    ) -> Finiteness {
        let Self { target, post, fold } = self;
        match post {
            Scale::None => final_sum(target, sources, each, Multiply(1.0), fold),
            Scale::Multiply(post) => final_sum(target, sources, each, post, fold),
            Scale::Divide(post) => final_sum(target, sources, each, post, fold),
        }
    }
}

impl Finish for Carried<'_> {
    /// No summary, since more members follow.
    type Summary = ();

    fn pass<T: PassElement, M: Map, const N: usize>(self, sources: [&[T]; N], each: M) {
        let Self { sum, fold } = self;
        vectorized_to(
            M::WIDTH,
            #[inline(always)]
            move || {
                let len = sum.len();
                let sources = sources.map(|source| &source[..len]);
                match fold {
                    Fold::Replace => {
                        for (index, sum) in sum.iter_mut().enumerate() {
                            *sum = sum_at(&sources, each, index);
                        }
                    }
                    Fold::Add => {
                        for (index, sum) in sum.iter_mut().enumerate() {
                            *sum = add_at(*sum, &sources, each, index);
                        }
                    }
                }
            },
        );
    }
}

/// Returns the sum of the elements of all sources at an index.
#[inline(always)]
fn sum_at<T: PassElement, M: Map, const N: usize>(
    sources: &[&[T]; N],
    each: M,
    index: usize,
) -> f32 {
    add_at(each.apply(sources[0][index].widened()), &sources[1..], each, index)
}

/// Adds the elements of the sources at an index to a sum.
#[inline(always)]
fn add_at<T: PassElement, M: Map>(mut sum: f32, sources: &[&[T]], each: M, index: usize) -> f32 {
    for source in sources {
        sum += each.apply(source[index].widened());
    }
    sum
}

/// The loop of a [`FinalSum`], for a dtype, a number of members and a way to divide.
fn final_sum<T: PassElement, M: Map, P: Map, const N: usize>(
    target: &mut [f32],
    sources: [&[T]; N],
    each: M,
    post: P,
    fold: Fold,
) -> Finiteness {
    vectorized_to(
        M::WIDTH,
        #[inline(always)]
        move || {
            // Cut to one length, so that the compiler knows that they have one length.
            let len = target.len();
            let sources = sources.map(|source| &source[..len]);
            // Without an early exit, so that the loops vectorize.
            let mut suspect = 0;
            match fold {
                Fold::Replace => {
                    for (index, target) in target.iter_mut().enumerate() {
                        *target = post.apply(sum_at(&sources, each, index));
                        suspect |= non_finite_bits(*target);
                    }
                }
                Fold::Add => {
                    for (index, target) in target.iter_mut().enumerate() {
                        *target += post.apply(sum_at(&sources, each, index));
                        suspect |= non_finite_bits(*target);
                    }
                }
            }
            if suspect == 0 { Finiteness::AllFinite } else { Finiteness::Suspect }
        },
    )
}

fn in_blocks(
    target: &mut [f32],
    contributions: &[Values<'_>],
    scaling: Scaling,
    fold: Fold,
) -> Option<usize> {
    let mut first = None;
    let mut sums = [0.0; BLOCK];
    for (block, start) in target.chunks_mut(BLOCK).zip((0..).step_by(BLOCK)) {
        let sums = &mut sums[..block.len()];
        sums.fill(0.0);
        let mut first_few = Fold::Replace;
        for few in contributions.chunks(FUSED) {
            let mut lent = [Values::F32(&[]); FUSED];
            for (lent, values) in lent.iter_mut().zip(few) {
                *lent = values.slice(start..start + block.len());
            }
            contribute_all(sums, &lent[..few.len()], scaling.pre, scaling.wire, first_few);
            first_few = Fold::Add;
        }
        settle(block, sums, scaling.post, fold);
        first = first.or_else(|| Some(start + first_non_finite(block)?));
    }
    first
}

#[cfg(test)]
mod tests;
