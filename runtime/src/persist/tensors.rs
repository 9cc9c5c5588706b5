//! The tensors of an optimizer's state, and the ranks that have their elements.

use std::ops::Range;

use hsdp_kernels::copy_past_caches;
use hsdp_sharding::{Param, ParamId};

/// Kind of the state of an average of the parameters.
pub(crate) const AVERAGE: &str = "ema";

/// Copies elements, from the `from`-th on, until `into` is full.
pub(crate) fn copy_part(all: &[f32], (from, into): (usize, &mut [f32])) {
    copy_past_caches(into, &all[from..from + into.len()]);
}

/// A tensor of an optimizer's state, f32. Its name in a checkpoint is
/// `optimizer:<kind>:<parameter>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// The kind of state, such as `exp_avg`.
    pub kind: &'static str,
    /// The parameter.
    pub parameter: ParamId,
    /// The relation of its elements to those of the parameter.
    pub spread: Spread,
}

/// The relation of the elements of a tensor of state to those of its parameter, and so to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// An element for each of the parameter: the tensor has its shape, and each rank of a shard
    /// group has a part.
    Elements,
    /// An element for each block of this number of elements of the parameter, which is cut between
    /// blocks only.
    Blocks(usize),
    /// A number of elements; each rank of the shard group has all of them.
    Whole(usize),
    /// A number of elements; one rank of the shard group has all of them.
    Owned {
        /// The number.
        len: usize,
        /// The rank's index in the shard group.
        owner: usize,
    },
}

impl Spread {
    /// Returns the shape of the tensor for a parameter.
    pub(crate) fn shape(self, parameter: &Param) -> Vec<u64> {
        match self {
            Self::Elements => parameter.shape.iter().map(|size| *size as u64).collect(),
            Self::Blocks(block) => vec![parameter.numel().div_ceil(block) as u64],
            Self::Whole(len) | Self::Owned { len, .. } => vec![len as u64],
        }
    }

    /// Returns the elements of the tensor that belong to `range` of the parameter.
    pub(crate) fn range(self, range: Range<usize>) -> Range<usize> {
        match self {
            Self::Elements => range,
            Self::Blocks(block) => range.start.div_ceil(block)..range.end.div_ceil(block),
            Self::Whole(len) | Self::Owned { len, .. } => 0..len,
        }
    }
}

/// The part of a checkpoint that an optimizer expects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// The tensors.
    pub tensors: Vec<StateTensor>,
    /// The parameters whose updates are counted.
    pub counted: Vec<ParamId>,
}
