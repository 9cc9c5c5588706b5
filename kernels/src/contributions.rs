//! A reduction of a few members in one pass: every gradient is read once, and the partial read and written once.
//!
//! [`contribute`] and [`settle`] make a pass over the sum for each member, and [`first_non_finite`] another. Where the sum
//! stays in the first-level cache that costs no memory traffic, but it costs instructions, which are what limits a wire of
//! 16 bit. Here divisions, roundings, the sum and the check stay in registers. More members take turns, a few at a time: a
//! pass over a short part of one gradient is over before the machine has seen what to fetch ahead, and a few such parts at once
//! keep memory busy.

use bytemuck::cast_slice;

use crate::accumulate::{Fold, Scaling, contribute, lossless, settle};
use crate::convert::BLOCK;
use crate::divisor::{Divisor, Scale};
use crate::inspect::first_non_finite;
use crate::map::{Map, Multiply, RoundBF16, Then};
use crate::round::from_bf16_bits;
use crate::simd::{Kernel, dispatch};
use crate::values::Values;
use crate::wire::Wire;

/// How many members one pass reads at once; with more, there are several passes over a block in the first-level cache.
pub const FUSED: usize = 4;

/// Sums the members' contributions and takes the sum into the target: the same bits as [`contribute`] for each of them,
/// in their order, then [`settle`] with `fold`, then [`first_non_finite`] of the target, which is returned. (Of two NaN
/// that are added, either may remain.)
///
/// In one pass for up to [`FUSED`] members with gradients of f32 or bf16, a wire of f32 or bf16, and a `pre` that is a power
/// of two; block after block in the first-level cache for others. Without members the sum is zeros.
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
            "sum contributions: lengths of target and contribution"
        );
    }
    let finish = Settled { target: &mut *target, post: scaling.post.scale(), fold };
    match by_dtype(finish, contributions, scaling) {
        Some(Outcome::AllFinite) => None,
        Some(Outcome::Suspect) => first_non_finite(target),
        None => in_blocks(target, contributions, scaling, fold),
    }
}

/// Adds a few members' gradients to a sum: the same bits as [`contribute`] for each of them, in their order. (Of two NaN that
/// are added, either may remain.) The first of them replaces what was there where `fold` says so.
///
/// In one pass where [`sum_contributions`] makes one.
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
        assert_eq!(sum.len(), values.len(), "contribute all: lengths of sum and contribution");
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

/// What becomes of the sum of a pass.
trait Finish {
    /// What the pass sees of its results.
    type Seen;

    /// Makes the pass: the contributions, of one length, are the sources with `each` applied to them.
    fn pass<T: Source, M: Map, const N: usize>(self, sources: [&[T]; N], each: M) -> Self::Seen;
}

/// It is divided and taken into the target.
struct Settled<'a> {
    target: &'a mut [f32],
    post: Scale,
    fold: Fold,
}

/// It goes on from the sum of those before, or begins.
struct Carried<'a> {
    sum: &'a mut [f32],
    fold: Fold,
}

/// What a pass saw of its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    AllFinite,
    Suspect,
}

/// The bits of a bf16.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct BF16(u16);

/// An element that a pass reads.
trait Source: Copy {
    /// The elements, if they are of this dtype.
    fn of(values: Values<'_>) -> Option<&[Self]>;

    /// The number in f32. Always inlined into the loop.
    fn widened(self) -> f32;
}

impl Source for f32 {
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

impl Source for BF16 {
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

/// `None` where there is no such pass.
fn by_dtype<F: Finish>(
    finish: F,
    contributions: &[Values<'_>],
    scaling: Scaling,
) -> Option<F::Seen> {
    match contributions {
        [Values::F32(_), ..] => by_members::<f32, F>(finish, contributions, scaling),
        [Values::BF16(_), ..] => by_members::<BF16, F>(finish, contributions, scaling),
        _ => None,
    }
}

fn by_members<T: Source, F: Finish>(
    finish: F,
    contributions: &[Values<'_>],
    scaling: Scaling,
) -> Option<F::Seen> {
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

fn by_wire<T: Source, F: Finish, const N: usize>(
    finish: F,
    sources: [&[T]; N],
    scaling: Scaling,
) -> Option<F::Seen> {
    let pre = match scaling.pre.scale() {
        Scale::None => Multiply(1.0),
        Scale::Multiply(scale) => scale,
        Scale::Divide(_) => return None,
    };
    match scaling.wire {
        Wire::F32 => Some(finish.pass(sources, pre)),
        Wire::BF16 => Some(finish.pass(sources, Then(pre, RoundBF16))),
        Wire::F16 => None,
    }
}

impl Finish for Settled<'_> {
    type Seen = Outcome;

    fn pass<T: Source, M: Map, const N: usize>(self, sources: [&[T]; N], each: M) -> Outcome {
        let Self { target, post, fold } = self;
        match post {
            Scale::None => dispatch(Pass { target, sources, each, post: Multiply(1.0), fold }),
            Scale::Multiply(post) => dispatch(Pass { target, sources, each, post, fold }),
            Scale::Divide(post) => dispatch(Pass { target, sources, each, post, fold }),
        }
    }
}

impl Finish for Carried<'_> {
    /// Nothing: more is to come.
    type Seen = ();

    fn pass<T: Source, M: Map, const N: usize>(self, sources: [&[T]; N], each: M) {
        dispatch(Carry { sum: self.sum, sources, each, fold: self.fold });
    }
}

struct Pass<'a, T, M, P, const N: usize> {
    target: &'a mut [f32],
    sources: [&'a [T]; N],
    each: M,
    post: P,
    fold: Fold,
}

impl<T: Source, M: Map, P: Map, const N: usize> Kernel for Pass<'_, T, M, P, N> {
    type Output = Outcome;

    #[inline(always)]
    fn run(self) -> Outcome {
        let Self { target, sources, each, post, fold } = self;
        // Slices of one length, which the compiler then knows to be of one length.
        let len = target.len();
        let sources = sources.map(|source| &source[..len]);
        let sum = |index: usize| {
            let mut sum = each.apply(sources[0][index].widened());
            for source in &sources[1..] {
                sum += each.apply(source[index].widened());
            }
            post.apply(sum)
        };
        // Without an early exit, so that the loops vectorise.
        let mut suspect = 0;
        match fold {
            Fold::Replace => {
                for (index, target) in target.iter_mut().enumerate() {
                    *target = sum(index);
                    suspect |= u32::from(!target.is_finite());
                }
            }
            Fold::Add => {
                for (index, target) in target.iter_mut().enumerate() {
                    *target += sum(index);
                    suspect |= u32::from(!target.is_finite());
                }
            }
        }
        if suspect == 0 { Outcome::AllFinite } else { Outcome::Suspect }
    }
}

struct Carry<'a, T, M, const N: usize> {
    sum: &'a mut [f32],
    sources: [&'a [T]; N],
    each: M,
    fold: Fold,
}

impl<T: Source, M: Map, const N: usize> Kernel for Carry<'_, T, M, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { sum, sources, each, fold } = self;
        let len = sum.len();
        let sources = sources.map(|source| &source[..len]);
        let add = |mut sum: f32, sources: &[&[T]], index: usize| {
            for source in sources {
                sum += each.apply(source[index].widened());
            }
            sum
        };
        match fold {
            Fold::Replace => {
                for (index, sum) in sum.iter_mut().enumerate() {
                    let first = each.apply(sources[0][index].widened());
                    *sum = add(first, &sources[1..], index);
                }
            }
            Fold::Add => {
                for (index, sum) in sum.iter_mut().enumerate() {
                    *sum = add(*sum, &sources, index);
                }
            }
        }
    }
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
