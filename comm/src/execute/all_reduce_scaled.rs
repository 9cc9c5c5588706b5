//! The runtime's all-reduce: partials are divided, rounded to the wire, summed in member order and divided again.

use std::ops::Range;

use hsdp_kernels::{DisjointVec, Fold, Values, sum_contributions};
use hsdp_sharding::balanced;

use super::{
    BLOCK_ELEMENTS, Buffers, Meter, Outputs, PerMember, Work, one_length, owned_blocks, take,
};
use crate::Scaling;
use crate::pattern::Pattern;

/// What a member brings.
pub(crate) struct Scaled(pub(crate) Vec<f32>);

impl Buffers for Scaled {
    type Output = Vec<f32>;

    fn imagined(self, _pattern: &Pattern<'_>) -> Vec<f32> {
        self.0
    }
}

/// A scaled sum that replaces every member's elements.
pub(crate) struct AllReduceScaled {
    values: Vec<DisjointVec<f32>>,
    scaling: Scaling,
    /// The slots that add up, and their elements: slices of the balanced split. They cover all elements once.
    blocks: Vec<(usize, Range<usize>)>,
}

impl AllReduceScaled {
    /// # Errors
    /// If the vectors differ in length.
    pub(crate) fn new(members: Vec<Scaled>, scaling: Scaling) -> Result<Self, String> {
        let disjoint = |Scaled(values)| DisjointVec::from(values);
        let values: Vec<_> = members.into_iter().map(disjoint).collect();
        let (len, members) = (one_length(values.iter().map(DisjointVec::len))?, values.len());
        let owned = (0..members).map(|slot| (slot, balanced(len, members, slot)));
        let blocks = owned_blocks(owned, BLOCK_ELEMENTS);
        Ok(Self { values, scaling, blocks })
    }
}

impl Work for AllReduceScaled {
    type Output = Vec<f32>;

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn bytes(&self) -> usize {
        self.values[0].len() * self.values.len() * size_of::<f32>()
    }

    /// Reads the block of every member into a sum before it writes the result to any of them.
    fn run(&self, block: usize, _meter: &Meter<'_>) {
        let (_, range) = &self.blocks[block];
        let mut sums = [0.0; BLOCK_ELEMENTS];
        let sums = &mut sums[..range.len()];
        // SAFETY: CO-2, blocks do not overlap, each is run once, and the values are different vectors.
        let slice = |values| unsafe { take(values, range.clone()) };
        let mut values: PerMember<&mut [f32]> = self.values.iter().map(slice).collect();
        let contributions: PerMember<_> = values.iter().map(|values| Values::F32(values)).collect();
        // The reader of the result finds elements that are not finite.
        let _ = sum_contributions(sums, &contributions, self.scaling, Fold::Replace);
        drop(contributions);
        values.iter_mut().for_each(|target| target.copy_from_slice(sums));
    }

    fn finish(self) -> Outputs<Vec<f32>> {
        self.values.into_iter().map(DisjointVec::into_vec).collect()
    }
}
