//! Products of matrices.

use std::ops::Range;

use gemm::{Parallelism, gemm};

use crate::accumulate::Fold;

/// A matrix of f32 in memory, whose rows are contiguous; or the transpose of one, or a part of one.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    /// Elements from a row to the next, and from a column to the next.
    strides: (usize, usize),
}

impl<'a> Matrix<'a> {
    /// The matrix of these sizes, whose rows are one after the other in `values`.
    ///
    /// # Panics
    /// If there are not `rows * columns` values.
    #[must_use]
    pub fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        let count = rows.checked_mul(columns);
        assert_eq!(count, Some(values.len()), "the elements of {rows} x {columns}");
        Self { values, rows, columns, strides: (columns, 1) }
    }

    /// Its transpose, in the same memory.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { values, rows, columns, strides } = self;
        Self { values, rows: columns, columns: rows, strides: (strides.1, strides.0) }
    }

    /// Some of its columns, in the same memory.
    ///
    /// # Panics
    /// If it has fewer columns.
    pub(crate) fn columns(self, range: Range<usize>) -> Self {
        let Self { values, rows, columns, strides } = self;
        assert!(range.start <= range.end && range.end <= columns, "{range:?} of {columns} columns");
        let columns = range.len();
        if rows == 0 || columns == 0 {
            return Self { values: &[], rows, columns, strides };
        }
        let reach = (rows - 1) * strides.0 + (columns - 1) * strides.1 + 1;
        let values = &values[range.start * strides.1..][..reach];
        Self { values, rows, columns, strides }
    }
}

/// The threads that compute a product. The bits of the result do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread.
    One,
    /// Threads of rayon's current pool, if the product is large.
    Pool,
}

impl Threads {
    fn of_gemm(self) -> Parallelism {
        match self {
            // In a pool of one thread, ranks that are threads would wait for each other.
            Self::Pool if rayon::current_num_threads() > 1 => Parallelism::Rayon(0),
            _ => Parallelism::None,
        }
    }
}

/// Replaces `target` by the product of `a` and `b`, or adds the product to it. The rows of `target`
/// are contiguous.
///
/// The crate `gemm` computes the product with the widest vectors that this machine has, AVX-512
/// among them, and fuses multiplications with additions. So the bits depend on the processor; on
/// one machine they are the same in each run.
///
/// # Panics
/// If `a` has not as many columns as `b` has rows, or `target` has not the size of the product.
pub fn matmul(target: &mut [f32], fold: Fold, factors: [Matrix<'_>; 2], threads: Threads) {
    let [a, b] = factors;
    assert_eq!(a.columns, b.rows, "the inner sizes of a product");
    assert_eq!(a.rows.checked_mul(b.columns), Some(target.len()), "the elements of a product");
    // SAFETY: K-6, the target is borrowed alone, and has the size of the product.
    unsafe { multiply(target.as_mut_ptr(), fold, factors, threads) }
}

/// Returns the product of `a` and `b`, whose rows are contiguous. It has the bits of [`matmul`], and
/// its memory is written once.
///
/// # Panics
/// If `a` has not as many columns as `b` has rows, or there is no memory for the product.
#[must_use]
pub fn product(factors: [Matrix<'_>; 2], threads: Threads) -> Vec<f32> {
    let [a, b] = factors;
    assert_eq!(a.columns, b.rows, "the inner sizes of a product");
    let len = a.rows.checked_mul(b.columns).expect("a product whose elements can be counted");
    let mut product = Vec::<f32>::with_capacity(len);
    // SAFETY: K-6, the target is the capacity of a new vector, which has the size of the product.
    unsafe { multiply(product.as_mut_ptr(), Fold::Replace, factors, threads) }
    // SAFETY: K-6, a product that replaces its target writes all elements, and reads none.
    unsafe { product.set_len(len) };
    product
}

/// Computes a product at `target`.
///
/// # Safety
/// K-6: `target` points to as many elements as the product has, which no other code accesses. They
/// are initialized if the product is added.
unsafe fn multiply(target: *mut f32, fold: Fold, [a, b]: [Matrix<'_>; 2], threads: Threads) {
    let row = b.columns.cast_signed();
    let column = 1;
    let [(a_row, a_column), (b_row, b_column)] = [a, b]
        .map(|Matrix { strides: (row, column), .. }| (row.cast_signed(), column.cast_signed()));
    // SAFETY: K-6, the sizes and strides of each matrix reach no further than its elements, and the
    // caller vouches for the target.
    unsafe {
        gemm(
            a.rows,
            b.columns,
            a.columns,
            target,
            column,
            row,
            fold == Fold::Add,
            a.values.as_ptr(),
            a_column,
            a_row,
            b.values.as_ptr(),
            b_column,
            b_row,
            1.0,
            1.0,
            false,
            false,
            false,
            threads.of_gemm(),
        );
    }
}

#[cfg(test)]
mod tests;
