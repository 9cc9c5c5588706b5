//! Attention of the heads that share a key-value head.

use std::ops::Range;

use hsdp_kernels::{Fold, Matrix, Threads, matmul, vectorized};

use super::place::Sizes;
use crate::nn::scores::{Kernel, shown};

/// Number of queries in a block. With a thousand keys, two blocks of scores fit in the second-level
/// cache.
pub(crate) const BLOCK: usize = 64;

/// Gradients of queries, keys and values in the layout that the group reads. `None` if candle does
/// not track the input.
pub(super) type Gradients = [Option<Vec<f32>>; 3];

/// The heads that one key-value head serves, in one sequence.
pub(super) struct Group<'a> {
    pub(super) sizes: &'a Sizes,
    pub(super) softmax: &'a Kernel<'a>,
    pub(super) index: usize,
}

/// A block of queries of one head.
struct Block {
    /// Index of the first query among the rows of scores.
    row: usize,
    /// Range of the queries in the group.
    queries: Range<usize>,
    /// Range of keys that one of the queries may see.
    keys: Range<usize>,
}

impl Block {
    /// Returns the number of scores.
    fn scores(&self) -> usize {
        self.queries.len() * self.keys.len()
    }
}

impl Group<'_> {
    /// Returns the blocks that see a key.
    fn blocks(&self) -> impl Iterator<Item = Block> {
        let Sizes { queries, heads, kv_heads, .. } = *self.sizes;
        let shared = heads / kv_heads;
        (0..shared)
            .flat_map(move |head| {
                let before = head * queries;
                (0..queries).step_by(BLOCK).map(move |start| {
                    let end = queries.min(start + BLOCK);
                    let row = self.index * shared * queries + before + start;
                    let last = row + end - start - 1;
                    let keys = self.softmax.visible(row).start..self.softmax.visible(last).end;
                    Block { row, queries: before + start..before + end, keys }
                })
            })
            .filter(|block| !block.keys.is_empty())
    }

    /// Returns a buffer for the scores of any block.
    fn room(&self) -> Vec<f32> {
        vec![0.0; self.blocks().map(|block| block.scores()).max().unwrap_or(0)]
    }

    /// Returns some rows of queries, keys or values as a matrix.
    fn matrix<'a>(&self, values: &'a [f32], rows: Range<usize>) -> Matrix<'a> {
        let dim = self.sizes.dim;
        Matrix::new(&values[rows.start * dim..rows.end * dim], rows.len(), dim)
    }

    /// Replaces the products of a block's queries and keys with the shares.
    fn to_shares(&self, block: &Block, shares: &mut [f32]) {
        let first = block.keys.start;
        for (row, shares) in (block.row..).zip(shares.chunks_exact_mut(block.keys.len())) {
            let visible = self.softmax.visible(row);
            let shares = shown(shares, visible.start - first..visible.end - first);
            vectorized(|| self.softmax.shares_or_zeros(row, shares));
        }
    }

    /// Returns the output, from queries, keys and values.
    pub(super) fn forward(&self, [q, k, v]: [&[f32]; 3]) -> Vec<f32> {
        let (mut output, dim) = (vec![0.0; q.len()], self.sizes.dim);
        let mut room = self.room();
        for block in self.blocks() {
            let (queries, keys) = (block.queries.clone(), block.keys.clone());
            let shares = &mut room[..block.scores()];
            let output = &mut output[queries.start * dim..queries.end * dim];
            let q = self.matrix(q, queries.clone());
            let [k, v] = [k, v].map(|values| self.matrix(values, keys.clone()));
            matmul(shares, Fold::Replace, [q, k.t()], Threads::One);
            self.to_shares(&block, shares);
            let shares = Matrix::new(shares, queries.len(), keys.len());
            matmul(output, Fold::Replace, [shares, v], Threads::One);
        }
        output
    }

    /// Returns the gradients of tracked queries, keys and values, from these and the gradient of
    /// the output.
    pub(super) fn backward(
        &self,
        [q, k, v]: [&[f32]; 3],
        tracked: [bool; 3],
        g: &[f32],
    ) -> Gradients {
        let dim = self.sizes.dim;
        let zeros = |input: usize, like: &[f32]| tracked[input].then(|| vec![0.0; like.len()]);
        let [mut of_q, mut of_k, mut of_v] = [zeros(0, q), zeros(1, k), zeros(2, v)];
        let mut room = [self.room(), self.room()];
        for block in self.blocks() {
            let (queries, keys) = (block.queries.clone(), block.keys.clone());
            let [shares, of_scores] = room.each_mut().map(|room| &mut room[..block.scores()]);
            let [q, g] = [q, g].map(|values| self.matrix(values, queries.clone()));
            let [k, v] = [k, v].map(|values| self.matrix(values, keys.clone()));
            matmul(shares, Fold::Replace, [q, k.t()], Threads::One);
            let products = if self.softmax.is_capped() { shares.to_vec() } else { Vec::new() };
            self.to_shares(&block, shares);
            matmul(of_scores, Fold::Replace, [g, v.t()], Threads::One);
            self.to_gradients(&block, shares, of_scores);
            vectorized(|| self.softmax.through_cap(&products, of_scores));
            let [shares, of_scores] =
                [&*shares, of_scores].map(|values| Matrix::new(values, queries.len(), keys.len()));
            if let Some(of_q) = &mut of_q {
                let of_q = &mut of_q[queries.start * dim..queries.end * dim];
                matmul(of_q, Fold::Replace, [of_scores, k], Threads::One);
            }
            if let Some(of_k) = &mut of_k {
                let of_k = &mut of_k[keys.start * dim..keys.end * dim];
                matmul(of_k, Fold::Add, [of_scores.t(), q], Threads::One);
            }
            if let Some(of_v) = &mut of_v {
                let of_v = &mut of_v[keys.start * dim..keys.end * dim];
                matmul(of_v, Fold::Add, [shares.t(), g], Threads::One);
            }
        }
        [of_q, of_k, of_v]
    }

    /// Replaces the gradients of a block's shares with the gradients of its products, except for
    /// the cap.
    fn to_gradients(&self, block: &Block, shares: &[f32], gradients: &mut [f32]) {
        let keys = block.keys.len();
        let rows = shares.chunks_exact(keys).zip(gradients.chunks_exact_mut(keys));
        for (shares, gradients) in rows {
            vectorized(|| self.softmax.to_gradients(shares, gradients));
        }
    }
}
