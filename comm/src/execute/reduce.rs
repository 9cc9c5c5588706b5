//! Operations that combine the members' elements, in member order, where some of them lie: all_reduce, reduce, and the runtime's own
//! all-reduce, whose partials are divided, rounded to the wire, summed and divided again.

use std::convert::identity;
use std::ops::Range;

use hsdp_kernels::{
    DisjointVec, Element, Fold, ReduceOp, Values, average_elements, reduce_elements,
    sum_contributions,
};

use super::member_buffers::{MemberBuffers, Source};
use super::{
    BLOCK_BYTES, Buffers, Cuts, Meter, Outputs, PerMember, Work, blocks_of, one_length, take,
};
use crate::pattern::Pattern;
use crate::{Reduction, Scaling};

/// Elements that are combined at a time, in a short block and in a long one: the result stays in a near cache until it is where it belongs. A long
/// buffer takes longer to be made than a short block to be combined.
const SHORT: usize = 1 << 10;
const LONG: usize = 1 << 13;

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

/// The contribution of a member to a scaled sum, which replaces its elements.
pub(crate) struct Scaled(pub(crate) Vec<f32>);

impl Buffers for Scaled {
    type Output = Vec<f32>;

    fn output_alone(self, _pattern: &Pattern<'_>) -> Vec<f32> {
        self.0
    }
}

/// A reduction whose result replaces the receivers' own elements.
struct Reduce<T, C, O> {
    values: Vec<DisjointVec<T>>,
    /// The arithmetic: elements of all members become one.
    combine: C,
    /// The slot of the member that alone gets the result; `None` if all do.
    root: Option<usize>,
    cuts: Cuts,
    /// By slot: the output that a member gets with the elements in its buffer.
    outputs: Vec<fn(Vec<T>) -> O>,
}

/// Every member gets the result.
///
/// # Errors
/// If the vectors differ in length.
pub(crate) fn all_reduce<T: Element>(
    values: Vec<Vec<T>>,
    reduction: Reduction,
) -> Result<impl Work<Output = Vec<T>>, String> {
    let outputs = vec![identity as fn(_) -> _; values.len()];
    Reduce::new(values, None, outputs, move |target: &mut [T], sources: &[&[T]]| {
        combine(reduction, target, sources);
    })
}

/// Every member gets the scaled sum.
///
/// # Errors
/// If the vectors differ in length.
pub(crate) fn all_reduce_scaled(
    members: Vec<Scaled>,
    scaling: Scaling,
) -> Result<impl Work<Output = Vec<f32>>, String> {
    let outputs = vec![identity as fn(_) -> _; members.len()];
    let values = members.into_iter().map(|Scaled(values)| values).collect();
    Reduce::new(values, None, outputs, move |target: &mut [f32], sources: &[&[f32]]| {
        let contributions: PerMember<_> = sources.iter().map(|it| Values::F32(it)).collect();
        // The reader of the result finds elements that are not finite.
        let _ = sum_contributions(target, &contributions, scaling, Fold::Replace);
    })
}

/// The root gets the result. It brings its elements as its target, the others as their sources.
///
/// # Errors
/// If they differ in length.
pub(crate) fn reduce<T: Element>(
    members: Vec<MemberBuffers<T>>,
    reduction: Reduction,
    root: usize,
) -> Result<impl Work<Output = MemberBuffers<T>>, String> {
    let outputs = members.iter().map(output).collect();
    let values = members.into_iter().map(Vec::from).collect();
    Reduce::new(values, Some(root), outputs, move |target: &mut [T], sources: &[&[T]]| {
        combine(reduction, target, sources);
    })
}

/// The root, which has a target, gets the result; another member gets its own buffer back if it lent that.
fn output<T>(member: &MemberBuffers<T>) -> fn(Vec<T>) -> MemberBuffers<T> {
    match (&member.target, &member.source) {
        (Some(_), _) => |values| MemberBuffers { source: Source::nothing(), target: Some(values) },
        (None, Source::Lent(_)) => {
            |values| MemberBuffers { source: Source::Lent(values), target: None }
        }
        (None, Source::Given(_)) => |_| MemberBuffers { source: Source::nothing(), target: None },
    }
}

impl<T: Element, C, O> Reduce<T, C, O> {
    /// # Errors
    /// If the vectors differ in length.
    fn new(
        values: Vec<Vec<T>>,
        root: Option<usize>,
        outputs: Vec<fn(Vec<T>) -> O>,
        combine: C,
    ) -> Result<Self, String> {
        let len = one_length(values.iter().map(Vec::len))?;
        // Where all members get the result, each may run a block, however short the vectors are.
        let most = BLOCK_BYTES / size_of::<T>();
        let block_len = root.map_or(len.div_ceil(values.len()).clamp(1, most), |_| most);
        let cuts = Cuts { len, block_len };
        let values = values.into_iter().map(DisjointVec::from).collect();
        Ok(Self { values, combine, root, cuts, outputs })
    }
}

impl<T: Element, C: Fn(&mut [T], &[&[T]]), O> Reduce<T, C, O> {
    /// Combines a range by means of a buffer for results, as many elements at a time as it has. No element is written before it was
    /// read.
    fn combine_by(&self, results: &mut [T], range: Range<usize>) {
        // SAFETY: CO-2, blocks do not overlap, each is run once, and the values are different vectors.
        let slice = |values| unsafe { take(values, range.clone()) };
        let mut values: PerMember<&mut [T]> = self.values.iter().map(slice).collect();
        for step in blocks_of(0..range.len(), results.len()) {
            let result = &mut results[..step.len()];
            let sources: PerMember<&[T]> = values.iter().map(|it| &it[step.clone()]).collect();
            (self.combine)(result, &sources);
            drop(sources);
            match self.root {
                Some(root) => values[root][step].copy_from_slice(result),
                None => values.iter_mut().for_each(|it| it[step.clone()].copy_from_slice(result)),
            }
        }
    }
}

impl<T, C, O> Work for Reduce<T, C, O>
where
    T: Element,
    C: Fn(&mut [T], &[&[T]]) + Send + Sync + 'static,
    O: Send + 'static,
{
    type Output = O;

    fn blocks(&self) -> usize {
        self.cuts.each()
    }

    fn bytes(&self) -> usize {
        self.cuts.len * self.values.len() * size_of::<T>()
    }

    fn run(&self, block: usize, _meter: &Meter<'_>) {
        let (_, range) = self.cuts.block(block);
        match range.len() <= SHORT {
            true => self.combine_by(&mut [T::zeroed(); SHORT], range),
            false => self.combine_by(&mut [T::zeroed(); LONG], range),
        }
    }

    fn finish(self) -> Outputs<O> {
        let values = self.values.into_iter().map(DisjointVec::into_vec);
        values.zip(self.outputs).map(|(values, output)| output(values)).collect()
    }
}
