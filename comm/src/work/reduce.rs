//! Operations that combine the members' elements, in member order: all_reduce, reduce, reduce_scatter.

use std::ops::Range;

use hsdp_kernels::{DisjointVec, Element, average_elements, reduce_elements};
use hsdp_sharding::balanced;

use super::{BLOCK_BYTES, Meter, Work, one_length, owned_blocks, take};
use crate::Reduction;

/// Combines `sources` into `target`.
pub(crate) fn combine<T: Element>(reduction: Reduction, target: &mut [T], sources: &[&[T]]) {
    match reduction {
        Reduction::Avg => {
            average_elements(target, sources).expect("averages of integers are refused")
        }
        _ => reduce_elements(reduction.fold(), target, sources),
    }
}

/// Who gets the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receivers {
    /// Every member. Member `i` combines the `i`-th slice of the balanced split, and hands it to all.
    All,
    /// The member in this slot, which combines everything.
    Root(usize),
}

/// A reduction whose result replaces the receivers' own elements.
pub(crate) struct ReduceInPlace<T> {
    values: Vec<DisjointVec<T>>,
    reduction: Reduction,
    receivers: Receivers,
    /// Who combines, and which elements. They cover all elements once.
    blocks: Vec<(usize, Range<usize>)>,
}

impl<T: Element> ReduceInPlace<T> {
    /// # Errors
    /// If the vectors differ in length.
    pub(crate) fn new(
        values: Vec<Vec<T>>,
        reduction: Reduction,
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
        Ok(Self { values, reduction, receivers, blocks })
    }
}

impl<T: Element> Work for ReduceInPlace<T> {
    type Output = Vec<T>;

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn bytes(&self) -> usize {
        self.values[0].len() * self.values.len() * size_of::<T>()
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        let (owner, range) = &self.blocks[block];
        // SAFETY: CO-2, blocks do not overlap, each is run once, and the values are different vectors.
        let slice = |values| unsafe { take(values, range.clone()) };
        let mut values: Vec<&mut [T]> = self.values.iter().map(slice).collect();
        let mut result = bytemuck::zeroed_vec::<T>(range.len());
        combine(self.reduction, &mut result, &values.iter().map(|it| &**it).collect::<Vec<_>>());
        for (from, source) in values.iter().enumerate() {
            meter.received(*owner, from, source.len(), size_of::<T>());
        }
        match self.receivers {
            Receivers::Root(root) => values[root].copy_from_slice(&result),
            Receivers::All => {
                for (to, target) in values.iter_mut().enumerate() {
                    target.copy_from_slice(&result);
                    meter.received(to, *owner, result.len(), size_of::<T>());
                }
            }
        }
    }

    fn finish(self) -> Vec<Vec<T>> {
        self.values.into_iter().map(DisjointVec::into_vec).collect()
    }
}

/// A reduction whose result only the root gets.
pub(crate) struct RootOnly<T> {
    reduce: ReduceInPlace<T>,
    root: usize,
}

impl<T: Element> RootOnly<T> {
    /// # Errors
    /// If the vectors differ in length.
    pub(crate) fn new(
        values: Vec<Vec<T>>,
        reduction: Reduction,
        root: usize,
    ) -> Result<Self, String> {
        let reduce = ReduceInPlace::new(values, reduction, Receivers::Root(root))?;
        Ok(Self { reduce, root })
    }
}

impl<T: Element> Work for RootOnly<T> {
    type Output = Option<Vec<T>>;

    fn blocks(&self) -> usize {
        self.reduce.blocks()
    }

    fn bytes(&self) -> usize {
        self.reduce.bytes()
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        self.reduce.run(block, meter);
    }

    fn finish(self) -> Vec<Option<Vec<T>>> {
        let outputs = self.reduce.finish().into_iter().enumerate();
        outputs.map(|(slot, output)| (slot == self.root).then_some(output)).collect()
    }
}

/// A reduction of which each member gets its part.
pub(crate) struct ReduceScatter<T> {
    sources: Vec<Vec<T>>,
    targets: Vec<DisjointVec<T>>,
    reduction: Reduction,
    /// Who combines, and which elements of its part. They cover all parts once.
    blocks: Vec<(usize, Range<usize>)>,
}

impl<T: Element> ReduceScatter<T> {
    /// Of pairs of a source and a target.
    ///
    /// # Errors
    /// If the targets differ in length, or a source is not as long as all of them together.
    pub(crate) fn new(
        members: Vec<(Vec<T>, Vec<T>)>,
        reduction: Reduction,
    ) -> Result<Self, String> {
        let part = one_length(members.iter().map(|(_, target)| target.len()))?;
        let whole = one_length(members.iter().map(|(source, _)| source.len()))?;
        if whole != part * members.len() {
            return Err(format!("{whole} elements are no {} parts of {part}", members.len()));
        }
        let owned = (0..members.len()).map(|owner| (owner, 0..part));
        let blocks = owned_blocks(owned, BLOCK_BYTES / size_of::<T>());
        let members = members.into_iter().map(|(source, target)| (source, target.into()));
        let (sources, targets) = members.unzip();
        Ok(Self { sources, targets, reduction, blocks })
    }
}

impl<T: Element> Work for ReduceScatter<T> {
    type Output = Vec<T>;

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn bytes(&self) -> usize {
        self.sources[0].len() * size_of::<T>()
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        let (owner, range) = &self.blocks[block];
        // SAFETY: CO-2, blocks of one target do not overlap, and each is run once.
        let target = unsafe { take(&self.targets[*owner], range.clone()) };
        let start = owner * self.targets[*owner].len() + range.start;
        let sources: Vec<&[T]> =
            self.sources.iter().map(|source| &source[start..start + range.len()]).collect();
        combine(self.reduction, target, &sources);
        for (from, source) in sources.iter().enumerate() {
            meter.received(*owner, from, source.len(), size_of::<T>());
        }
    }

    fn finish(self) -> Vec<Vec<T>> {
        self.targets.into_iter().map(DisjointVec::into_vec).collect()
    }
}
