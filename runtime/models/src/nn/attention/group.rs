//! The attention of the heads that share a key-value head.

use std::ops::Range;

use hsdp_kernels::{Fold, Matrix, Threads, matmul, vectorized};

use super::place::Sizes;
use crate::nn::scores::Kernel;

/// The queries of a block. With a thousand keys, two blocks of scores fit in the second-level cache.
pub(crate) const BLOCK: usize = 64;

/// The gradients of queries, keys and values, each as the group reads it; `None` if candle does not track it.
pub(super) type Gradients = [Option<Vec<f32>>; 3];

/// The heads that one key-value head serves, in one sequence.
pub(super) struct Group<'a> {
    pub(super) sizes: &'a Sizes,
    pub(super) softmax: &'a Kernel<'a>,
    pub(super) index: usize,
}

/// A block of queries of one head.
struct Block {
    /// The place of its first query among the rows of scores.
    row: usize,
    /// Its queries among those of the group.
    queries: Range<usize>,
    /// The number of keys that its last query may see.
    keys: usize,
}

impl Group<'_> {
    /// Those that see a key.
    fn blocks(&self) -> impl Iterator<Item = Block> {
        let Sizes { queries, heads, kv_heads, .. } = *self.sizes;
        let shared = heads / kv_heads;
        (0..shared)
            .flat_map(move |head| {
                let before = head * queries;
                (0..queries).step_by(BLOCK).map(move |start| {
                    let end = queries.min(start + BLOCK);
                    let row = self.index * shared * queries + before + start;
                    let keys = self.softmax.visible(row + end - start - 1);
                    Block { row, queries: before + start..before + end, keys }
                })
            })
            .filter(|block| block.keys > 0)
    }

    /// Some rows of queries, keys or values.
    fn matrix<'a>(&self, values: &'a [f32], rows: Range<usize>) -> Matrix<'a> {
        let dim = self.sizes.dim;
        Matrix::new(&values[rows.start * dim..rows.end * dim], rows.len(), dim)
    }

    /// The shares of a block's keys, from its queries and the keys.
    fn shares(&self, block: &Block, [q, k]: [Matrix<'_>; 2], shares: &mut [f32]) {
        matmul(shares, Fold::Replace, [q, k.t()], Threads::One);
        for (row, shares) in (block.row..).zip(shares.chunks_exact_mut(block.keys)) {
            let (shares, hidden) = shares.split_at_mut(self.softmax.visible(row));
            vectorized(|| self.softmax.shares_or_zeros(row, shares));
            hidden.fill(0.0);
        }
    }

    /// The output, from queries, keys and values.
    pub(super) fn forward(&self, [q, k, v]: [&[f32]; 3]) -> Vec<f32> {
        let (mut output, dim) = (vec![0.0; q.len()], self.sizes.dim);
        let mut room = vec![0.0; BLOCK.min(self.sizes.queries) * self.sizes.keys];
        for block in self.blocks() {
            let (queries, keys) = (block.queries.clone(), block.keys);
            let shares = &mut room[..queries.len() * keys];
            let output = &mut output[queries.start * dim..queries.end * dim];
            let q = self.matrix(q, queries.clone());
            let [k, v] = [k, v].map(|values| self.matrix(values, 0..keys));
            self.shares(&block, [q, k], shares);
            let shares = Matrix::new(shares, queries.len(), keys);
            matmul(output, Fold::Replace, [shares, v], Threads::One);
        }
        output
    }

    /// The gradients of the tracked ones of queries, keys and values, from these and the gradient of the output.
    pub(super) fn backward(
        &self,
        [q, k, v]: [&[f32]; 3],
        tracked: [bool; 3],
        g: &[f32],
    ) -> Gradients {
        let dim = self.sizes.dim;
        let zeros = |input: usize, like: &[f32]| tracked[input].then(|| vec![0.0; like.len()]);
        let [mut of_q, mut of_k, mut of_v] = [zeros(0, q), zeros(1, k), zeros(2, v)];
        let mut room = [(); 2].map(|()| vec![0.0; BLOCK.min(self.sizes.queries) * self.sizes.keys]);
        for block in self.blocks() {
            let (queries, keys) = (block.queries.clone(), block.keys);
            let [shares, of_scores] = room.each_mut().map(|room| &mut room[..queries.len() * keys]);
            let [q, g] = [q, g].map(|values| self.matrix(values, queries.clone()));
            let [k, v] = [k, v].map(|values| self.matrix(values, 0..keys));
            self.shares(&block, [q, k], shares);
            matmul(of_scores, Fold::Replace, [g, v.t()], Threads::One);
            self.to_gradients(&block, shares, of_scores);
            let [shares, of_scores] =
                [&*shares, of_scores].map(|values| Matrix::new(values, queries.len(), keys));
            if let Some(of_q) = &mut of_q {
                let of_q = &mut of_q[queries.start * dim..queries.end * dim];
                matmul(of_q, Fold::Replace, [of_scores, k], Threads::One);
            }
            if let Some(of_k) = &mut of_k {
                let of_k = &mut of_k[..keys * dim];
                matmul(of_k, Fold::Add, [of_scores.t(), q], Threads::One);
            }
            if let Some(of_v) = &mut of_v {
                let of_v = &mut of_v[..keys * dim];
                matmul(of_v, Fold::Add, [shares.t(), g], Threads::One);
            }
        }
        [of_q, of_k, of_v]
    }

    /// Replaces the gradients of a block's shares by those of its scores.
    fn to_gradients(&self, block: &Block, shares: &[f32], gradients: &mut [f32]) {
        let rows = shares.chunks_exact(block.keys).zip(gradients.chunks_exact_mut(block.keys));
        for (shares, gradients) in rows {
            vectorized(|| self.softmax.to_gradients(shares, gradients));
        }
    }
}
