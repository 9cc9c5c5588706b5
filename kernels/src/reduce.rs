//! The arithmetic of the general collectives.

use std::fmt;

use bytemuck::Zeroable;

use crate::convert::BLOCK;
use crate::element::Element;
use crate::error::Error;
use crate::number::{Inside, Number};
use crate::simd::{Kernel, dispatch};

/// How a reduction joins two elements.
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

impl fmt::Display for ReduceOp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Sum => "sum",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
        })
    }
}

/// Reduces `sources` into `target`, element by element, in the order of the sources.
///
/// `target[i] = sources[0][i] op sources[1][i] op ...`, from the left. What `target` held is not read. The 16-bit floats
/// are computed in f32 and rounded once; all others in their own type.
///
/// # Panics
///
/// If `sources` is empty, or one differs from `target` in length.
pub fn reduce_elements<T: Element>(op: ReduceOp, target: &mut [T], sources: &[&[T]]) {
    in_blocks(target, sources, |accumulators, source| join(op, accumulators, source), |_| ());
}

/// The average of `sources`: their sum, as [`reduce_elements`] computes it, divided by their number.
///
/// The 16-bit floats are summed and divided in f32, and rounded once.
///
/// # Errors
///
/// [`Error::IntegerAverage`] for integers.
///
/// # Panics
///
/// If `sources` is empty, or one differs from `target` in length.
pub fn average_elements<T: Element>(target: &mut [T], sources: &[&[T]]) -> Result<(), Error> {
    let count = sources.len();
    let Some(divide) = T::Accumulator::DIVIDE else {
        return Err(Error::IntegerAverage { dtype: T::DTYPE, sources: count });
    };
    let add = |accumulators: &mut [_], source: &[_]| join(ReduceOp::Sum, accumulators, source);
    in_blocks(target, sources, add, |accumulators| {
        for sum in accumulators {
            *sum = divide(*sum, count);
        }
    });
    Ok(())
}

/// Runs a reduction in blocks that stay in the first-level cache: `join` for each source after the first, then `finish`.
fn in_blocks<T: Element>(
    target: &mut [T],
    sources: &[&[T]],
    join: impl Fn(&mut [T::Accumulator], &[T::Accumulator]),
    finish: impl Fn(&mut [T::Accumulator]),
) {
    for source in sources {
        assert_eq!(source.len(), target.len(), "reduce: lengths of a source and the target");
    }
    let [first, others @ ..] = sources else { panic!("reduce: there is no source") };
    let mut accumulators = [T::Accumulator::zeroed(); BLOCK];
    let mut widened = [T::Accumulator::zeroed(); BLOCK];
    for (index, target) in target.chunks_mut(BLOCK).enumerate() {
        let block = index * BLOCK..index * BLOCK + target.len();
        let widened = &mut widened[..target.len()];
        let scratch = &mut accumulators[..target.len()];
        let fill = |accumulators: &mut [T::Accumulator]| {
            let first = T::widen(&first[block.clone()], widened, Inside::HERE);
            accumulators.copy_from_slice(first);
            for source in others {
                join(accumulators, T::widen(&source[block.clone()], widened, Inside::HERE));
            }
            finish(accumulators);
        };
        T::narrow(target, scratch, fill, Inside::HERE);
    }
}

fn join<N: Number>(op: ReduceOp, left: &mut [N], right: &[N]) {
    match op {
        ReduceOp::Sum => dispatch(Join { left, right, join: Sum }),
        ReduceOp::Product => dispatch(Join { left, right, join: Product }),
        ReduceOp::Min => dispatch(Join { left, right, join: Min }),
        ReduceOp::Max => dispatch(Join { left, right, join: Max }),
    }
}

/// A [`ReduceOp`] as a type, so that the loop is compiled for each.
trait Operation<N>: Copy {
    fn join(self, left: N, right: N) -> N;
}

#[derive(Clone, Copy)]
struct Sum;
#[derive(Clone, Copy)]
struct Product;
#[derive(Clone, Copy)]
struct Min;
#[derive(Clone, Copy)]
struct Max;

impl<N: Number> Operation<N> for Sum {
    #[inline(always)]
    fn join(self, left: N, right: N) -> N {
        left.sum(right)
    }
}

impl<N: Number> Operation<N> for Product {
    #[inline(always)]
    fn join(self, left: N, right: N) -> N {
        left.product(right)
    }
}

impl<N: Number> Operation<N> for Min {
    #[inline(always)]
    fn join(self, left: N, right: N) -> N {
        left.lesser(right)
    }
}

impl<N: Number> Operation<N> for Max {
    #[inline(always)]
    fn join(self, left: N, right: N) -> N {
        left.greater(right)
    }
}

struct Join<'a, N, O> {
    left: &'a mut [N],
    right: &'a [N],
    join: O,
}

impl<N: Number, O: Operation<N>> Kernel for Join<'_, N, O> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (left, &right) in self.left.iter_mut().zip(self.right) {
            *left = self.join.join(*left, right);
        }
    }
}

#[cfg(test)]
mod tests;
