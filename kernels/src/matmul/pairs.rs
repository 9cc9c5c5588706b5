//! Products of bf16 by AVX512-BF16, whose instruction adds the products of two pairs to an f32.

use std::cell::RefCell;

use gemmkit::driver::run;
use gemmkit::kernel::{AlphaStatus, BetaStatus, Bf16DotGemmF32, Identity, KernelFamily};
use gemmkit::simd::{Avx512Bf16, KernelSimd};
use gemmkit::{Parallelism, Workspace};
use half::bf16;

use super::Matrix;
use super::pack::{Lanes, pack};
use crate::accumulate::Fold;
use crate::values::Values;

/// Number of f32 in a vector.
const VECTOR: usize = 16;

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
            if has_more_rows { (rows, ROWS) } else { (columns, COLUMN_VECTORS * VECTOR) };
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
                run::<Pairs, Avx512Bf16, COLUMN_VECTORS, ROWS>(
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

/// gemmkit's products of bf16, with factors that this crate packs.
#[derive(Clone, Copy)]
struct Pairs;

impl KernelFamily for Pairs {
    type Lhs = bf16;
    type Rhs = bf16;
    type Acc = f32;
    type Out = f32;

    const FORCE_PACK_LHS: bool = Bf16DotGemmF32::FORCE_PACK_LHS;
    const FORCE_PACK_RHS: bool = Bf16DotGemmF32::FORCE_PACK_RHS;
    const DEPTH_MULTIPLE: usize = Bf16DotGemmF32::DEPTH_MULTIPLE;

    unsafe fn pack_lhs(
        target: *mut bf16,
        first: *const bf16,
        stride: isize,
        inner_stride: isize,
        count: usize,
        inner: usize,
        width: usize,
    ) {
        assert_eq!(width, COLUMN_VECTORS * VECTOR, "the lanes of a panel of columns");
        let lanes = Lanes { first, count, inner, stride, inner_stride };
        // SAFETY: K-8, the driver has room for the panels of lanes of a matrix, and K-6 the check.
        unsafe { pack::<{ COLUMN_VECTORS * VECTOR }>(target, lanes) };
    }

    unsafe fn pack_rhs(
        target: *mut bf16,
        first: *const bf16,
        inner_stride: isize,
        stride: isize,
        inner: usize,
        count: usize,
        width: usize,
    ) {
        assert_eq!(width, ROWS, "the lanes of a panel of rows");
        let lanes = Lanes { first, count, inner, stride, inner_stride };
        // SAFETY: K-8, as above.
        unsafe { pack::<ROWS>(target, lanes) };
    }

    #[inline(always)]
    unsafe fn microkernel<S, const MR_REG: usize, const NR: usize>(
        simd: S,
        kc: usize,
        alpha: f32,
        beta: f32,
        alpha_status: AlphaStatus,
        beta_status: BetaStatus,
        a: *const bf16,
        a_cs: isize,
        b: *const bf16,
        b_rs: isize,
        b_cs: isize,
        c: *mut f32,
        rsc: isize,
        csc: isize,
        mr_eff: usize,
        nr_eff: usize,
        scratch: *mut f32,
    ) where
        S: KernelSimd<bf16, bf16, f32, f32>,
    {
        // The kernel does not read the place of the tile, nor whether it is the last slice.
        let (row, column, is_last) = (0, 0, true);
        // SAFETY: K-8, the panels are those that this kernel reads, and K-6 for the target.
        unsafe {
            Bf16DotGemmF32::microkernel_epi::<S, Identity, MR_REG, NR>(
                simd,
                kc,
                alpha,
                beta,
                alpha_status,
                beta_status,
                a,
                a_cs,
                b,
                b_rs,
                b_cs,
                c,
                rsc,
                csc,
                mr_eff,
                nr_eff,
                row,
                column,
                is_last,
                &Identity,
                scratch,
            );
        }
    }
}
