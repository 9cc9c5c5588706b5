//! Products of matrices.
//!
//! Two factors of bf16 are multiplied by AVX-512's instruction for pairs of bf16 (`vdpbf16ps`),
//! where the processor has it, at up to twice the speed of f32. All other factors are converted to
//! f32.

use std::ops::Range;

use gemm::{Parallelism, gemm};

use crate::accumulate::Fold;
use crate::values::Values;

#[cfg(target_arch = "x86_64")]
mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;

/// A matrix in memory, whose rows are contiguous; or the transpose of one, or a part of one.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: Values<'a>,
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
    pub fn new(values: impl Into<Values<'a>>, rows: usize, columns: usize) -> Self {
        let values = values.into();
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
            return Self { values: values.slice(0..0), rows, columns, strides };
        }
        let start = range.start * strides.1;
        let reach = (rows - 1) * strides.0 + (columns - 1) * strides.1 + 1;
        Self { values: values.slice(start..start + reach), rows, columns, strides }
    }

    /// Returns the strides of rows and of columns.
    const fn signed_strides(self) -> (isize, isize) {
        (self.strides.0.cast_signed(), self.strides.1.cast_signed())
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
    /// Returns the number of threads. In a pool of one thread nothing goes through rayon: ranks
    /// that are threads would wait for each other.
    pub(crate) fn count(self) -> usize {
        match self {
            Self::One => 1,
            Self::Pool => rayon::current_num_threads(),
        }
    }

    fn of_gemm(self) -> Parallelism {
        if self.count() > 1 { Parallelism::Rayon(0) } else { Parallelism::None }
    }
}

/// Replaces `target` by the product of `a` and `b`, or adds the product to it. The rows of `target`
/// are contiguous.
///
/// Elements are multiplied and summed in f32, whatever their dtypes, by the widest vectors of this
/// machine, and multiplications are fused with additions. So the bits depend on the processor; on
/// one machine they are the same in each run. A product of two factors of bf16 has other bits on
/// processors with AVX512-BF16 ([`multiplies_bf16`]), which sum in pairs and take subnormal numbers
/// for zeros, those of the target among them.
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

/// Returns whether this processor has instructions that multiply bf16, which [`matmul`] and
/// [`product`] use if both factors are bf16.
#[must_use]
pub fn multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return crate::simd::has_avx512_bf16();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Returns the product of `a` and `b`, whose rows are contiguous. It has the bits of [`matmul`],
/// and its memory is written once.
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
    #[cfg(target_arch = "x86_64")]
    if let [Values::BF16(_), Values::BF16(_)] = [a.values, b.values]
        && a.columns > 0
        && multiplies_bf16()
    {
        // SAFETY: K-6, the target is the caller's, and the condition saw the instructions.
        return unsafe { pairs::multiply(target, fold, [a, b], threads.count()) };
    }
    let [of_a, of_b] = [a.values.wide(), b.values.wide()];
    let (a_row, a_column) = a.signed_strides();
    let (b_row, b_column) = b.signed_strides();
    let row = b.columns.cast_signed();
    let column = 1;
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
            of_a.as_ptr(),
            a_column,
            a_row,
            of_b.as_ptr(),
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
