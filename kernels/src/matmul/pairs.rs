//! Products of bf16 by AVX512-BF16, whose instruction adds the products of two pairs to an f32.

use std::cell::RefCell;

use gemmkit::driver::run;
use gemmkit::kernel::Bf16DotGemmF32;
use gemmkit::simd::Avx512Bf16;
use gemmkit::{Parallelism, Workspace};

use super::Matrix;
use crate::accumulate::Fold;
use crate::values::Values;

/// Number of f32 in a vector.
const LANES: usize = 16;

/// Number of vectors of columns in the tile of a product that is computed in registers.
const COLUMN_VECTORS: usize = 2;

/// Number of rows in a tile.
const ROWS: usize = 12;

/// Minimum number of multiplications for a thread. One thread makes them in about 10 us.
const LEAST: usize = 1 << 20;

thread_local! {
    /// Memory for blocks of the factors in the order in which the registers read them. It grows to
    /// at most twice the third-level cache.
    static PACKED: RefCell<Workspace> = const { RefCell::new(Workspace::new()) };
}

/// Computes the product of two matrices of bf16 on some threads of rayon's current pool. The order
/// in which the products of an element are added does not depend on the number of threads.
///
/// # Safety
/// K-6: `target` points to as many elements as the product has, which no other code accesses. They
/// are initialized if the product is added. The inner size is not 0, and this machine has
/// AVX512-BF16.
pub(super) unsafe fn multiply(
    target: *mut f32,
    fold: Fold,
    [a, b]: [Matrix<'_>; 2],
    threads: usize,
) {
    let part = Part { target, row: b.columns, fold, a, b };
    // SAFETY: K-6, as the caller vouches.
    unsafe { part.multiply(threads) }
}

/// A part of a product: a range of its rows and columns.
#[derive(Clone, Copy)]
struct Part<'a> {
    target: *mut f32,
    /// Elements from a row of the target to the next.
    row: usize,
    fold: Fold,
    a: Matrix<'a>,
    b: Matrix<'a>,
}

// SAFETY: K-6, the parts of a product have no element of the target in common, and no other code
// accesses it.
unsafe impl Send for Part<'_> {}

impl Part<'_> {
    /// Computes the part. Halves the longer side until each thread has a part of its own.
    ///
    /// # Safety
    /// K-6, as for [`multiply`].
    unsafe fn multiply(self, threads: usize) {
        let [rows, columns] = [self.a.rows, self.b.columns];
        let multiplications = rows.saturating_mul(columns).saturating_mul(self.a.columns);
        if threads < 2 || multiplications < 2 * LEAST {
            // SAFETY: K-6, as the caller vouches.
            return unsafe { self.multiply_here() };
        }
        let half = threads / 2;
        let has_more_rows = rows >= columns;
        let (side, tile) =
            if has_more_rows { (rows, ROWS) } else { (columns, COLUMN_VECTORS * LANES) };
        let cut = (side * half / threads).next_multiple_of(tile);
        if cut >= side {
            // SAFETY: K-6, as the caller vouches.
            return unsafe { self.multiply_here() };
        }
        // SAFETY: K-6, the cut is before the end of its side, so an element of the part is there.
        let target = unsafe { self.target.add(if has_more_rows { cut * self.row } else { cut }) };
        let (first, second) = if has_more_rows {
            let of_rows = |range| self.a.t().columns(range).t();
            (Self { a: of_rows(0..cut), ..self }, Self { target, a: of_rows(cut..rows), ..self })
        } else {
            let [left, right] = [0..cut, cut..columns].map(|range| self.b.columns(range));
            (Self { b: left, ..self }, Self { target, b: right, ..self })
        };
        rayon::join(
            // SAFETY: K-6, as the caller vouches; the parts have no element in common.
            move || unsafe { first.multiply(half) },
            // SAFETY: K-6, as above.
            move || unsafe { second.multiply(threads - half) },
        );
    }

    /// Computes the part on this thread.
    ///
    /// # Safety
    /// K-6, as for [`multiply`].
    unsafe fn multiply_here(self) {
        let Self { target, row, fold, a, b } = self;
        let (Values::BF16(of_a), Values::BF16(of_b)) = (a.values, b.values) else {
            unreachable!("a product of pairs has factors of bf16")
        };
        if a.rows == 0 || b.columns == 0 {
            return;
        }
        let (a_row, a_column) = a.signed_strides();
        let (b_row, b_column) = b.signed_strides();
        let beta = if fold == Fold::Add { 1.0 } else { 0.0 };
        PACKED.with_borrow_mut(|packed| {
            // The kernel computes whole vectors of a column, so it gets the transposed product.
            // SAFETY: K-6, the sizes and strides of each matrix reach no further than its elements,
            // and the caller vouches for the target and the instructions.
            unsafe {
                run::<Bf16DotGemmF32, Avx512Bf16, COLUMN_VECTORS, ROWS>(
                    Avx512Bf16,
                    b.columns,
                    a.columns,
                    a.rows,
                    1.0,
                    of_b.as_ptr(),
                    b_column,
                    b_row,
                    of_a.as_ptr(),
                    a_column,
                    a_row,
                    beta,
                    target,
                    1,
                    row.cast_signed(),
                    Parallelism::Serial,
                    packed,
                );
            }
        });
    }
}
