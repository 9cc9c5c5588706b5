//! The runtime's all-reduce: partials are divided, rounded to the wire, summed in member order and divided again.

use std::ops::Range;

use hsdp_kernels::{DisjointVec, Fold, Values, sum_contributions};
use hsdp_sharding::balanced;

use super::{
    BLOCK_ELEMENTS, Deposits, Meter, Outputs, PerMember, Work, blocks_of, one_length, take,
};
use crate::Scaling;

/// What a member brings.
pub(crate) struct Scaled(pub(crate) Vec<f32>);

/// A scaled sum that replaces every member's elements.
pub(crate) struct AllReduceScaled {
    values: Vec<DisjointVec<f32>>,
    scaling: Scaling,
    blocks: Blocks,
}

/// Which elements are added up: parts of slices of the balanced split. They cover all elements once.
type Blocks = Vec<Range<usize>>;

impl AllReduceScaled {
    /// # Errors
    /// If the vectors differ in length.
    pub(crate) fn new(
        (mut values, mut blocks): (Vec<DisjointVec<f32>>, Blocks),
        members: Deposits<'_, Scaled>,
        scaling: Scaling,
    ) -> Result<Self, String> {
        values.extend(members.map(|Scaled(values)| DisjointVec::from(values)));
        let len = one_length(values.iter().map(DisjointVec::len))?;
        for slot in 0..values.len() {
            let owned = blocks_of(balanced(len, values.len(), slot), BLOCK_ELEMENTS);
            blocks.extend(owned);
        }
        Ok(Self { values, scaling, blocks })
    }
}

impl Work for AllReduceScaled {
    type Output = Vec<f32>;
    type Lists = (Vec<DisjointVec<f32>>, Blocks);

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn bytes(&self) -> usize {
        self.values[0].len() * self.values.len() * size_of::<f32>()
    }

    /// Reads the block of every member into a sum before it writes the result to any of them.
    fn run(&self, block: usize, _meter: &Meter<'_>) {
        let range = &self.blocks[block];
        let mut sums = [0.0; BLOCK_ELEMENTS];
        let sums = &mut sums[..range.len()];
        // SAFETY: CO-2, blocks do not overlap, each is run once, and the values are different vectors.
        let slice = |values| unsafe { take(values, range.clone()) };
        let mut values: PerMember<&mut [f32]> = self.values.iter().map(slice).collect();
        let contributions: PerMember<_> = values.iter().map(|values| Values::F32(values)).collect();
        // Whoever reads the result finds what is not finite in it.
        let _ = sum_contributions(sums, &contributions, self.scaling, Fold::Replace);
        drop(contributions);
        values.iter_mut().for_each(|target| target.copy_from_slice(sums));
    }

    fn finish(self, outputs: &mut Outputs<Vec<f32>>) -> Self::Lists {
        let Self { mut values, mut blocks, .. } = self;
        outputs.extend(values.drain(..).map(DisjointVec::into_vec));
        blocks.clear();
        (values, blocks)
    }
}
