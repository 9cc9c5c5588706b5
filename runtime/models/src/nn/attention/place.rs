//! The places of heads in tensors.

use candle_core::{Result, Tensor, bail};
use hsdp_kernels::{cast, unpack};

use super::NAME;
use crate::nn::element::Element;

/// Sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
}

impl Sizes {
    pub(super) fn of([q, k, v]: [&Tensor; 3]) -> Result<Self> {
        let dims = [q, k, v].map(Tensor::dims);
        let alike = k.dtype() == q.dtype() && v.dtype() == q.dtype() && k.dims() == v.dims();
        match dims {
            [&[batch, queries, heads, dim], &[of_k, keys, kv_heads, dim_of_k], _]
                if alike
                    && (of_k, dim_of_k) == (batch, dim)
                    && kv_heads > 0
                    && heads.is_multiple_of(kv_heads) =>
            {
                Ok(Self { batch, queries, keys, heads, kv_heads, dim })
            }
            [of_q, of_k, of_v] => {
                let [q, k, v] = [q, k, v].map(|tensor| tensor.dtype().as_str());
                bail!(
                    "{NAME}: q is {q} {of_q:?}, k is {k} {of_k:?} and v is {v} {of_v:?}: they need one dtype, [batch, queries, heads, dim], and twice [batch, keys, key-value heads, dim], where the number of key-value heads divides that of heads"
                )
            }
        }
    }

    pub(super) fn of_packed(qkv: &Tensor) -> Result<Self> {
        match *qkv.dims() {
            [batch, length, 3, heads, dim] if heads > 0 => {
                Ok(Self { batch, queries: length, keys: length, heads, kv_heads: heads, dim })
            }
            ref dims => {
                bail!("{NAME}: qkv has the shape {dims:?}, not [batch, length, 3, heads, dim]")
            }
        }
    }

    /// Returns the dims of the scores.
    pub(super) fn scores(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }

    /// Returns the dims of the output.
    pub(super) fn output(&self) -> [usize; 4] {
        [self.batch, self.queries, self.heads, self.dim]
    }
}

/// Places of the heads in inputs and output.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub(super) sizes: Sizes,
    /// Places in queries, keys and values.
    pub(super) inputs: [Place; 3],
    pub(super) output: Place,
}

impl Places {
    /// Returns the places in three tensors.
    pub(super) fn of_three(sizes: Sizes) -> Self {
        let Sizes { queries, keys, heads, kv_heads, dim, .. } = sizes;
        let q = Place::new([queries, kv_heads, heads / kv_heads, dim]);
        let k = Place::new([keys, kv_heads, 1, dim]);
        Self { sizes, inputs: [q, k, k], output: q }
    }

    /// Returns the places in one tensor, in which queries, keys and values of a position follow one
    /// another.
    pub(super) fn of_one(sizes: Sizes) -> Self {
        let Sizes { queries, heads, dim, .. } = sizes;
        let row = heads * dim;
        let output = Place::new([queries, heads, 1, dim]);
        let input = |index| Place { start: index * row, stride: 3 * row, ..output };
        Self { sizes, inputs: [0, 1, 2].map(input), output }
    }
}

/// Places of the heads in a tensor. Each `shared` heads that follow one another belong to a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    start: usize,
    /// Number of elements from a position to the next.
    stride: usize,
    positions: usize,
    groups: usize,
    shared: usize,
    dim: usize,
}

impl Place {
    /// Returns the places in a tensor `[batch, positions, groups * shared, dim]`.
    fn new([positions, groups, shared, dim]: [usize; 4]) -> Self {
        Self { start: 0, stride: groups * shared * dim, positions, groups, shared, dim }
    }

    /// Returns the start of each row of a group, head by head and by position in each head.
    fn rows(self, group: usize) -> impl Iterator<Item = usize> {
        let (batch, group) = (group / self.groups, group % self.groups);
        let heads = group * self.shared..(group + 1) * self.shared;
        heads.flat_map(move |head| {
            let start = self.start + batch * self.positions * self.stride + head * self.dim;
            (0..self.positions).map(move |position| start + position * self.stride)
        })
    }

    /// Reads the heads of a group in f32, `[shared, positions, dim]`.
    pub(super) fn read<T: Element>(self, from: &[T], group: usize) -> Vec<f32> {
        let mut heads = vec![0.0; self.shared * self.positions * self.dim];
        if self.dim > 0 {
            for (row, start) in heads.chunks_exact_mut(self.dim).zip(self.rows(group)) {
                unpack(row, T::values(&from[start..start + self.dim]));
            }
        }
        heads
    }

    /// Writes the heads of all groups, one after the other.
    pub(super) fn write<'a, T: Element>(
        self,
        to: &mut [T],
        groups: impl Iterator<Item = &'a [f32]>,
    ) {
        for (group, heads) in groups.enumerate().filter(|(_, heads)| !heads.is_empty()) {
            for (row, start) in heads.chunks_exact(self.dim).zip(self.rows(group)) {
                cast(T::values_mut(&mut to[start..start + self.dim]), row);
            }
        }
    }
}
