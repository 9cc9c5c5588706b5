//! The arithmetic of the general collectives.

use std::ops::Range;

use bytemuck::Zeroable;

use crate::accumulate::Fold;
use crate::convert::BLOCK;
use crate::element::Element;
use crate::error::Error;
use crate::number::{CrateToken, MOST_ABREAST, Number};
use crate::simd::vectorized;

/// The operation by which a reduction combines two elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Their sum; integers wrap around.
    Sum,
    /// Their product; integers wrap around.
    Product,
    /// The lesser; NaN if either is NaN.
    Min,
    /// The greater; NaN if either is NaN.
    Max,
}

/// Reduces `sources` into `target`, element by element, in the order of the sources.
///
/// `target[i] = sources[0][i] op sources[1][i] op ...`, from the left. The old elements of `target`
/// are not read. The 16-bit floats are computed in f32 and rounded once. All other types are
/// computed in their own type.
///
/// # Panics
///
/// If `sources` is empty, or one differs from `target` in length.
pub fn reduce_elements<T: Element>(op: ReduceOp, target: &mut [T], sources: &[&[T]]) {
    in_blocks(op, target, sources, |_| ());
}

/// Writes the average of `sources` into `target`: their sum, as [`reduce_elements`] computes it,
/// divided by their number.
///
/// The 16-bit floats are summed and divided in f32, and rounded once.
///
/// # Errors
///
/// [`Error::IntegerAverage`] if `T` is an integer type.
///
/// # Panics
///
/// If `sources` is empty, or one differs from `target` in length.
pub fn average_elements<T: Element>(target: &mut [T], sources: &[&[T]]) -> Result<(), Error> {
    let count = sources.len();
    let Some(divide) = T::Accumulator::DIVIDE else {
        return Err(Error::IntegerAverage { dtype: T::DTYPE, sources: count });
    };
    in_blocks(ReduceOp::Sum, target, sources, |accumulators| {
        for sum in accumulators {
            *sum = divide(*sum, count);
        }
    });
    Ok(())
}

/// Runs a reduction in blocks that stay in the first-level cache: several sources at a time, and
/// then `finish`.
fn in_blocks<T: Element>(
    op: ReduceOp,
    target: &mut [T],
    sources: &[&[T]],
    finish: impl Fn(&mut [T::Accumulator]),
) {
    for source in sources {
        assert_eq!(source.len(), target.len(), "reduce: lengths of a source and the target differ");
    }
    assert!(!sources.is_empty(), "reduce: there is no source");
    let mut accumulators = [T::Accumulator::zeroed(); BLOCK];
    let mut widened = [[T::Accumulator::zeroed(); BLOCK]; MOST_ABREAST];
    for (index, target) in target.chunks_mut(BLOCK).enumerate() {
        let block = index * BLOCK..index * BLOCK + target.len();
        let scratch = &mut accumulators[..target.len()];
        let fill = |accumulators: &mut [T::Accumulator]| {
            for (round, sources) in sources.chunks(T::ABREAST).enumerate() {
                let fold = if round == 0 { Fold::Replace } else { Fold::Add };
                let lanes = lanes(sources, &block, &mut widened);
                join(op, Accumulating { accumulators, fold }, &lanes[..sources.len()]);
            }
            finish(accumulators);
        };
        T::narrow(target, scratch, fill, CrateToken::HERE);
    }
}

/// A block of each source, as accumulators. Places without a source are empty.
fn lanes<'a, T: Element>(
    sources: &[&'a [T]],
    block: &Range<usize>,
    widened: &'a mut [[T::Accumulator; BLOCK]; MOST_ABREAST],
) -> [&'a [T::Accumulator]; MOST_ABREAST] {
    let mut lanes: [&[T::Accumulator]; MOST_ABREAST] = [&[]; MOST_ABREAST];
    for ((lane, source), widened) in lanes.iter_mut().zip(sources).zip(widened) {
        *lane = T::widen(&source[block.clone()], &mut widened[..block.len()], CrateToken::HERE);
    }
    lanes
}

/// Accumulators, and whether their contents take part in the reduction as its first operand.
struct Accumulating<'a, N> {
    accumulators: &'a mut [N],
    fold: Fold,
}

fn join<N: Number>(op: ReduceOp, target: Accumulating<'_, N>, lanes: &[&[N]]) {
    match op {
        ReduceOp::Sum => join_by(N::sum, target, lanes),
        ReduceOp::Product => join_by(N::product, target, lanes),
        ReduceOp::Min => join_by(N::lesser, target, lanes),
        ReduceOp::Max => join_by(N::greater, target, lanes),
    }
}

/// Joins elements by a function. Each function has a type of its own, so the loop is compiled for
/// each.
fn join_by<N: Number>(
    join: impl Fn(N, N) -> N + Copy,
    target: Accumulating<'_, N>,
    lanes: &[&[N]],
) {
    match *lanes {
        [a] => join_lanes(join, target, [a]),
        [a, b] => join_lanes(join, target, [a, b]),
        [a, b, c] => join_lanes(join, target, [a, b, c]),
        [a, b, c, d] => join_lanes(join, target, [a, b, c, d]),
        _ => unreachable!("one to {MOST_ABREAST} sources are joined at a time"),
    }
}

fn join_lanes<N: Number, const LANES: usize>(
    join: impl Fn(N, N) -> N,
    target: Accumulating<'_, N>,
    lanes: [&[N]; LANES],
) {
    vectorized(
        #[inline(always)]
        move || {
            let Accumulating { accumulators, fold } = target;
            // Cut to one length, so that the compiler checks no index in the loops.
            let lanes = lanes.map(|lane| &lane[..accumulators.len()]);
            let (first, others) = lanes.split_first().expect("there is a source");
            match fold {
                Fold::Replace => {
                    for (index, target) in accumulators.iter_mut().enumerate() {
                        let joined = |left, lane: &&[N]| join(left, lane[index]);
                        *target = others.iter().fold(first[index], joined);
                    }
                }
                Fold::Add => {
                    for (index, target) in accumulators.iter_mut().enumerate() {
                        let joined = |left, lane: &&[N]| join(left, lane[index]);
                        *target = lanes.iter().fold(*target, joined);
                    }
                }
            }
        },
    );
}

#[cfg(test)]
mod tests;
