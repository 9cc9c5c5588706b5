//! Operations that combine the members' elements, in member order, where some of them lie: all_reduce, reduce.

use std::ops::Range;

use hsdp_kernels::{DisjointVec, Element, ReduceOp, average_elements, reduce_elements};
use hsdp_sharding::balanced;

use super::exchange::{Exchange, Source};
use super::{
    BLOCK_BYTES, Meter, Outputs, PerMember, Work, blocks_of, one_length, owned_blocks, take,
};
use crate::Reduction;

/// Elements that are combined at a time: the result stays in the first-level cache until it is where it belongs.
const STEP: usize = 1 << 10;

/// Combines `sources` into `target`.
pub(crate) fn combine<T: Element>(reduction: Reduction, target: &mut [T], sources: &[&[T]]) {
    match reduction {
        Reduction::Avg => {
            average_elements(target, sources).expect("averages of integers are refused")
        }
        Reduction::Sum => reduce_elements(ReduceOp::Sum, target, sources),
        Reduction::Product => reduce_elements(ReduceOp::Product, target, sources),
        Reduction::Min => reduce_elements(ReduceOp::Min, target, sources),
        Reduction::Max => reduce_elements(ReduceOp::Max, target, sources),
    }
}

/// The members that get the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receivers {
    /// Every member. Member `i` combines the `i`-th slice of the balanced split, and hands it to all.
    All,
    /// The member in this slot, which combines everything.
    Root(usize),
}

/// The arithmetic of an operation: elements of all members become one.
pub(crate) trait Combine<T>: Send + Sync + 'static {
    fn combine(&self, target: &mut [T], sources: &[&[T]]);
}

impl<T: Element> Combine<T> for Reduction {
    fn combine(&self, target: &mut [T], sources: &[&[T]]) {
        combine(*self, target, sources);
    }
}

/// A reduction whose result replaces the receivers' own elements.
pub(crate) struct ReduceInPlace<T, C> {
    values: Vec<DisjointVec<T>>,
    combine: C,
    receivers: Receivers,
    /// The slots that combine, and their elements. They cover all elements once.
    blocks: Vec<(usize, Range<usize>)>,
}

impl<T: Element, C: Combine<T>> ReduceInPlace<T, C> {
    /// # Errors
    /// If the vectors differ in length.
    pub(crate) fn new(
        values: Vec<Vec<T>>,
        combine: C,
        receivers: Receivers,
    ) -> Result<Self, String> {
        let (len, members) = (one_length(values.iter().map(Vec::len))?, values.len());
        let owned: Vec<_> = match receivers {
            Receivers::All => {
                (0..members).map(|slot| (slot, balanced(len, members, slot))).collect()
            }
            Receivers::Root(root) => vec![(root, 0..len)],
        };
        let blocks = owned_blocks(owned, BLOCK_BYTES / size_of::<T>());
        let values = values.into_iter().map(DisjointVec::from).collect();
        Ok(Self { values, combine, receivers, blocks })
    }
}

impl<T: Element, C: Combine<T>> Work for ReduceInPlace<T, C> {
    type Output = Vec<T>;

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn bytes(&self) -> usize {
        self.values[0].len() * self.values.len() * size_of::<T>()
    }

    /// No element is written before it was read.
    fn run(&self, block: usize, _meter: &Meter<'_>) {
        let (_, range) = &self.blocks[block];
        // SAFETY: CO-2, blocks do not overlap, each is run once, and the values are different vectors.
        let slice = |values| unsafe { take(values, range.clone()) };
        let mut values: PerMember<&mut [T]> = self.values.iter().map(slice).collect();
        let mut result = [T::zeroed(); STEP];
        for step in blocks_of(0..range.len(), STEP) {
            let result = &mut result[..step.len()];
            let sources: PerMember<&[T]> = values.iter().map(|it| &it[step.clone()]).collect();
            self.combine.combine(result, &sources);
            drop(sources);
            match self.receivers {
                Receivers::Root(root) => values[root][step].copy_from_slice(result),
                Receivers::All => {
                    values.iter_mut().for_each(|it| it[step.clone()].copy_from_slice(result));
                }
            }
        }
    }

    fn finish(self) -> Outputs<Vec<T>> {
        self.values.into_iter().map(DisjointVec::into_vec).collect()
    }
}

/// A reduction whose result only the root gets, in its own buffer.
pub(crate) struct Reduce<T> {
    reduce: ReduceInPlace<T, Reduction>,
    /// By slot: the output that a member gets with the elements in its buffer.
    outputs: Vec<fn(Vec<T>) -> Exchange<T>>,
}

/// The root gets the result; another member gets its own buffer back if it lent that.
fn output<T>(source: &Source<T>, is_root: bool) -> fn(Vec<T>) -> Exchange<T> {
    match source {
        _ if is_root => |values| Exchange { source: Source::nothing(), target: Some(values) },
        Source::Lent(_) => |values| Exchange { source: Source::Lent(values), target: None },
        Source::Given(_) => |_| Exchange { source: Source::nothing(), target: None },
    }
}

impl<T: Element> Reduce<T> {
    /// The root brings its elements as its target, the others as their sources.
    ///
    /// # Errors
    /// If they differ in length.
    pub(crate) fn new(
        members: Vec<Exchange<T>>,
        reduction: Reduction,
        root: usize,
    ) -> Result<Self, String> {
        let slots = members.iter().enumerate();
        let outputs = slots.map(|(slot, it)| output(&it.source, slot == root)).collect();
        let values = members.into_iter().map(Vec::from).collect();
        let reduce = ReduceInPlace::new(values, reduction, Receivers::Root(root))?;
        Ok(Self { reduce, outputs })
    }
}

impl<T: Element> Work for Reduce<T> {
    type Output = Exchange<T>;

    fn blocks(&self) -> usize {
        self.reduce.blocks()
    }

    fn bytes(&self) -> usize {
        self.reduce.bytes()
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        self.reduce.run(block, meter);
    }

    fn finish(self) -> Outputs<Exchange<T>> {
        let values = self.reduce.values.into_iter().map(DisjointVec::into_vec);
        values.zip(self.outputs).map(|(values, output)| output(values)).collect()
    }
}
