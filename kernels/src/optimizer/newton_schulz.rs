//! The orthogonalization of the Muon optimizer.

use std::fmt;
use std::ops::Range;

use hsdp_sharding::DType;
use rayon::prelude::*;

use crate::accumulate::Fold;
use crate::inspect::squared_norm;
use crate::matmul::{Matrix, Threads, matmul};
use crate::round::{nearest_f32, round_bf16};
use crate::simd::vectorized;

/// The least number of columns that are multiplied at once: products of narrow matrices are slow.
const LEAST_COLUMNS: usize = 256;

/// The least number of multiplications, in a step of all matrices, for which the matrices are divided
/// among threads. With fewer, it takes longer to wake the threads than they save.
const LEAST_DIVIDED: usize = 1 << 20;

/// Newton-Schulz iterations, which move the singular values of a matrix towards 1 and keep its
/// singular vectors.
///
/// Sources: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024),
/// whose coefficients are the default; Liu et al., "Muon is scalable for LLM training", arXiv
/// 2502.16982. The order of the operations is that of `torch.optim.Muon`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NewtonSchulz {
    /// The number of iterations.
    pub steps: usize,
    /// The factors of x, x^3 and x^5 in an iteration of a singular value x.
    pub coefficients: [f64; 3],
    /// The least divisor of the matrix, in place of a norm below it.
    pub eps: f64,
    /// The dtype to which results are rounded, as PyTorch rounds them with tensors of this dtype.
    /// Products are summed in f32.
    pub dtype: MatrixDType,
}

/// The dtype of the elements of matrices that are multiplied: f32 or bf16. Displayed as `f32` and
/// `bf16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixDType {
    /// f32.
    F32,
    /// bf16.
    BF16,
}

impl From<MatrixDType> for DType {
    fn from(dtype: MatrixDType) -> Self {
        match dtype {
            MatrixDType::F32 => Self::F32,
            MatrixDType::BF16 => Self::BF16,
        }
    }
}

impl fmt::Display for MatrixDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        DType::from(*self).fmt(f)
    }
}

impl Default for NewtonSchulz {
    fn default() -> Self {
        let coefficients = [3.4445, -4.775, 2.0315];
        Self { steps: 5, coefficients, eps: 1e-7, dtype: MatrixDType::F32 }
    }
}

impl NewtonSchulz {
    /// The number of f32 that [`orthogonalize`](Self::orthogonalize) needs besides each matrix of
    /// these sizes: m * m + m * max(m, min(256, n)), where m is the lesser of the sizes, and n the
    /// greater.
    #[must_use]
    pub fn workspace(rows: usize, columns: usize) -> usize {
        let short = rows.min(columns);
        let long = rows.max(columns);
        short * (short + columns_at_once(short, long))
    }

    /// Replaces each of `count` matrices, `[count][rows * columns]`, by its orthogonalization. The
    /// elements of `workspace`, `[count][`[`workspace`](Self::workspace)`]`, have no meaning, before
    /// and after.
    ///
    /// With X a matrix, or its transpose if it has more rows than columns:
    ///
    /// ```text
    /// X = X / max(norm(X), eps)
    /// steps times:  A = X X^T;  B = b A + c A A;  X = a X + B X
    /// ```
    ///
    /// The squares of the norm are summed in f64. In bf16, X, the norm, A, B and each new X are
    /// rounded. The bits depend on the processor, as those of [`matmul`] do, and not on the
    /// threads or on the other matrices.
    ///
    /// As many matrices as give each thread the same number are divided among the threads, unless
    /// all of them are small. Of the others the threads divide each product, if it is large.
    ///
    /// # Panics
    /// If the matrices or the workspace have another length than their sizes say.
    pub fn orthogonalize(
        &self,
        matrices: &mut [f32],
        count: usize,
        rows: usize,
        columns: usize,
        workspace: &mut [f32],
        threads: Threads,
    ) {
        let own = Self::workspace(rows, columns);
        let lens = [rows.checked_mul(columns), Some(own)].map(|len| len?.checked_mul(count));
        let found = [matrices.len(), workspace.len()].map(Some);
        assert_eq!(
            lens, found,
            "orthogonalize: elements and workspace of {count} x {rows} x {columns}"
        );
        if matrices.is_empty() {
            return;
        }
        let numel = rows * columns;
        let one = |(matrix, workspace): (&mut [f32], &mut [f32]), threads| {
            self.orthogonalize_one(matrix, rows, columns, workspace, threads);
        };
        let short = rows.min(columns);
        let cost = count * short * short * (2 * rows.max(columns) + short);
        let is_divided = threads.count() > 1 && cost >= LEAST_DIVIDED;
        let divided = if is_divided { count - count % threads.count() } else { 0 };
        let (each, shared) = matrices.split_at_mut(divided * numel);
        let (of_each, of_shared) = workspace.split_at_mut(divided * own);
        if divided > 0 {
            let each = each.par_chunks_mut(numel).zip(of_each.par_chunks_mut(own));
            each.with_max_len(1).for_each(|pair| one(pair, Threads::One));
        }
        let shared = shared.chunks_mut(numel).zip(of_shared.chunks_mut(own));
        shared.for_each(|pair| one(pair, threads));
    }

    fn orthogonalize_one(
        &self,
        matrix: &mut [f32],
        rows: usize,
        columns: usize,
        workspace: &mut [f32],
        threads: Threads,
    ) {
        let short = rows.min(columns);
        let (gram, product) = workspace.split_at_mut(short * short);
        let round = self.dtype;
        round.all(matrix);
        let norm = round.one(nearest_f32(squared_norm(matrix).sqrt().max(self.eps)));
        round.replace(matrix, |value| value / norm);
        let mut iteration = HostIteration { matrix, rows, columns, gram, product, round, threads };
        let coefficients = self.coefficients.map(nearest_f32);
        (0..self.steps).for_each(|_| iteration.step(coefficients));
    }
}

/// The number of columns of X that are multiplied at once: their product needs no more memory than
/// a square.
fn columns_at_once(short: usize, long: usize) -> usize {
    short.max(long.min(LEAST_COLUMNS))
}

impl MatrixDType {
    /// The nearest value of this dtype.
    #[inline(always)]
    fn one(self, value: f32) -> f32 {
        if self == Self::BF16 { round_bf16(value) } else { value }
    }

    fn all(self, values: &mut [f32]) {
        if self == Self::BF16 {
            self.replace(values, |value| value);
        }
    }

    /// Replaces each value by a function of it, rounded.
    fn replace(self, values: &mut [f32], by: impl Fn(f32) -> f32) {
        vectorized(
            #[inline(always)]
            || values.iter_mut().for_each(|value| *value = self.one(by(*value))),
        );
    }

    /// Replaces `values` by `keep * values + take * others`, rounded.
    fn combine(self, values: &mut [f32], others: &[f32], keep: f32, take: f32) {
        vectorized(
            #[inline(always)]
            || {
                for (value, other) in values.iter_mut().zip(others) {
                    *value = self.one(keep * *value + take * other);
                }
            },
        );
    }
}

struct HostIteration<'a> {
    matrix: &'a mut [f32],
    rows: usize,
    columns: usize,
    /// A, then B.
    gram: &'a mut [f32],
    /// A A, then B times some columns of X.
    product: &'a mut [f32],
    round: MatrixDType,
    threads: Threads,
}

impl HostIteration<'_> {
    fn step(&mut self, [a, b, c]: [f32; 3]) {
        let short = self.rows.min(self.columns);
        let x = wide(self.matrix, self.rows, self.columns);
        matmul(self.gram, Fold::Replace, [x, x.t()], self.threads);
        self.round.all(self.gram);
        let gram = Matrix::new(&*self.gram, short, short);
        let square = &mut self.product[..short * short];
        matmul(square, Fold::Replace, [gram, gram], self.threads);
        self.round.combine(self.gram, square, b, c);
        let long = self.rows.max(self.columns);
        for start in (0..long).step_by(columns_at_once(short, long).max(1)) {
            let end = long.min(start + columns_at_once(short, long));
            self.add_product_to(start..end, a);
        }
    }

    /// Replaces these columns of X by `a X + B X`. A column of B X needs no other column of X.
    fn add_product_to(&mut self, range: Range<usize>, a: f32) {
        let rows = self.rows;
        let columns = self.columns;
        let short = rows.min(columns);
        let width = range.len();
        let part = wide(self.matrix, rows, columns).columns(range.clone());
        let b = Matrix::new(&*self.gram, short, short);
        let product = &mut self.product[..short * width];
        if rows > columns {
            // Columns of X are rows of the matrix, which are contiguous.
            matmul(product, Fold::Replace, [part.t(), b.t()], self.threads);
            let part = &mut self.matrix[range.start * short..range.end * short];
            return self.round.combine(part, product, a, 1.0);
        }
        matmul(product, Fold::Replace, [b, part], self.threads);
        for (row, product) in self.matrix.chunks_exact_mut(columns).zip(product.chunks(width)) {
            self.round.combine(&mut row[range.clone()], product, a, 1.0);
        }
    }
}

/// X: the matrix, or its transpose if it has more rows than columns.
fn wide(values: &[f32], rows: usize, columns: usize) -> Matrix<'_> {
    let matrix = Matrix::new(values, rows, columns);
    if rows > columns { matrix.t() } else { matrix }
}

#[cfg(test)]
mod tests;
