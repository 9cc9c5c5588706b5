//! Factors of a product in the order in which the registers read them.
//!
//! A panel holds `WIDTH` lanes, which are rows or columns of a factor, as pairs of their inner
//! elements: the first pair of each lane, then the second pair of each, and so on. Lanes beyond the
//! factor are zeros, and so is an element beyond an odd number of inner elements.
//!
//! gemmkit packs the same panels one element at a time, which took a tenth of a step in bf16 of a
//! GPT of width 384.

use std::arch::x86_64::{
    __m512i, __mmask16, __mmask32, _mm512_mask_storeu_epi32, _mm512_maskz_loadu_epi16,
    _mm512_permutex2var_epi16, _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use half::bf16;

/// Number of pairs in a vector.
const PAIRS: usize = 16;

/// Lanes of a factor in memory. Either each lane is contiguous, or the elements of all lanes at one
/// inner index are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lanes {
    pub(super) first: *const bf16,
    pub(super) count: usize,
    /// Number of elements of a lane.
    pub(super) inner: usize,
    /// Elements from a lane to the next.
    pub(super) stride: isize,
    /// Elements from an inner element to the next.
    pub(super) inner_stride: isize,
}

/// Writes the panels of some lanes to `target`, one after the other.
///
/// # Safety
/// K-8: the lanes are elements of a matrix. `target` has room for the lanes, rounded up to whole
/// panels, with `inner` elements each, rounded up to whole pairs. This machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn pack<const WIDTH: usize>(target: *mut bf16, lanes: Lanes) {
    let is_contiguous = lanes.stride == 1 || lanes.inner_stride == 1;
    assert!(is_contiguous, "a factor without contiguous elements");
    let pairs = lanes.inner.div_ceil(2);
    for (panel, start) in (0..lanes.count).step_by(WIDTH).enumerate() {
        let first = lanes.first.wrapping_offset(start.cast_signed() * lanes.stride);
        let part = Lanes { first, count: WIDTH.min(lanes.count - start), ..lanes };
        let target = target.cast::<i32>().wrapping_add(panel * pairs * WIDTH);
        if lanes.stride == 1 {
            // SAFETY: K-8, as the caller vouches for all panels.
            unsafe { interleave::<WIDTH>(target, part) };
        } else {
            // SAFETY: K-8, as above.
            unsafe { transpose::<WIDTH>(target, part) };
        }
    }
}

/// Writes a panel of lanes whose elements at one inner index are contiguous.
///
/// # Safety
/// K-8, as for [`pack`].
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave<const WIDTH: usize>(target: *mut i32, lanes: Lanes) {
    const { assert!(WIDTH <= 2 * PAIRS, "the lanes of two vectors") };
    let halves = interleaved_indices();
    let of_lanes = first_elements(lanes.count);
    for (pair, inner) in (0..lanes.inner).step_by(2).enumerate() {
        let at = |inner: usize| {
            lanes.first.wrapping_offset(inner.cast_signed() * lanes.inner_stride).cast::<i16>()
        };
        let of_second = if inner + 1 < lanes.inner { of_lanes } else { 0 };
        // SAFETY: K-8, the mask has the lanes, and this element of each.
        let even = unsafe { _mm512_maskz_loadu_epi16(of_lanes, at(inner)) };
        // SAFETY: K-8, the mask has the lanes if they have the element, and is empty otherwise.
        let odd = unsafe { _mm512_maskz_loadu_epi16(of_second, at(inner + 1)) };
        let target = target.wrapping_add(pair * WIDTH);
        for (vector, indices) in halves.into_iter().enumerate().take(WIDTH.div_ceil(PAIRS)) {
            let packed = _mm512_permutex2var_epi16(even, indices, odd);
            let mask = first_pairs(WIDTH - vector * PAIRS);
            // SAFETY: K-8, the mask has lanes of the panel.
            unsafe { _mm512_mask_storeu_epi32(target.wrapping_add(vector * PAIRS), mask, packed) };
        }
    }
}

/// Writes a panel of lanes whose elements are contiguous.
///
/// # Safety
/// K-8, as for [`pack`].
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose<const WIDTH: usize>(target: *mut i32, lanes: Lanes) {
    let count = lanes.inner.div_ceil(2);
    for pair in (0..count).step_by(PAIRS) {
        let elements = first_elements(lanes.inner - 2 * pair);
        for block in (0..WIDTH).step_by(PAIRS) {
            let mut rows = [_mm512_setzero_si512(); PAIRS];
            for (lane, row) in (block..).zip(&mut rows) {
                let first = lanes.first.wrapping_offset(lane.cast_signed() * lanes.stride);
                let mask = if lane < lanes.count { elements } else { 0 };
                // SAFETY: K-8, the mask has elements of the lane, or none beyond the lanes.
                *row =
                    unsafe { _mm512_maskz_loadu_epi16(mask, first.wrapping_add(2 * pair).cast()) };
            }
            let of_block = first_pairs(WIDTH - block);
            let target = target.wrapping_add(pair * WIDTH + block);
            for (row, packed) in transposed(rows).iter().enumerate() {
                let mask = if pair + row < count { of_block } else { 0 };
                // SAFETY: K-8, the mask has lanes of the panel, or none beyond its pairs.
                unsafe {
                    _mm512_mask_storeu_epi32(target.wrapping_add(row * WIDTH), mask, *packed)
                };
            }
        }
    }
}

/// Returns the indices with which `_mm512_permutex2var_epi16` alternates the elements of two
/// vectors: for their first halves, and for their second halves.
#[target_feature(enable = "avx512f")]
fn interleaved_indices() -> [__m512i; 2] {
    let mut halves = [_mm512_setzero_si512(); 2];
    for (half, vector) in (0_u16..).zip(&mut halves) {
        let mut indices = [0_u16; 2 * PAIRS];
        for (place, index) in (0_u16..).zip(&mut indices) {
            *index = half * 16 + place / 2 + (place % 2) * 32;
        }
        *vector = bytemuck::must_cast(indices);
    }
    halves
}

/// Returns the mask of the first `count` elements of a vector.
fn first_elements(count: usize) -> __mmask32 {
    if count < 32 { (1 << count) - 1 } else { !0 }
}

/// Returns the mask of the first `count` pairs of a vector.
fn first_pairs(count: usize) -> __mmask16 {
    if count < PAIRS { (1 << count) - 1 } else { !0 }
}

/// Returns the transpose of a square of 16 x 16 pairs.
#[target_feature(enable = "avx512f")]
fn transposed(rows: [__m512i; PAIRS]) -> [__m512i; PAIRS] {
    let mut twos = rows;
    for (two, rows) in twos.chunks_exact_mut(2).zip(rows.chunks_exact(2)) {
        two[0] = _mm512_unpacklo_epi32(rows[0], rows[1]);
        two[1] = _mm512_unpackhi_epi32(rows[0], rows[1]);
    }
    // Each quarter of `fours[4 * i + j]` has the pairs of rows 4 i to 4 i + 3 in one column: in
    // quarter q, column 4 q + j.
    let mut fours = twos;
    for (four, twos) in fours.chunks_exact_mut(4).zip(twos.chunks_exact(4)) {
        four[0] = _mm512_unpacklo_epi64(twos[0], twos[2]);
        four[1] = _mm512_unpackhi_epi64(twos[0], twos[2]);
        four[2] = _mm512_unpacklo_epi64(twos[1], twos[3]);
        four[3] = _mm512_unpackhi_epi64(twos[1], twos[3]);
    }
    let mut columns = fours;
    for column in 0..4 {
        let [a, b, c, d] =
            [fours[column], fours[column + 4], fours[column + 8], fours[column + 12]];
        let even_of_first = _mm512_shuffle_i32x4::<0x88>(a, b);
        let even_of_last = _mm512_shuffle_i32x4::<0x88>(c, d);
        let odd_of_first = _mm512_shuffle_i32x4::<0xdd>(a, b);
        let odd_of_last = _mm512_shuffle_i32x4::<0xdd>(c, d);
        columns[column] = _mm512_shuffle_i32x4::<0x88>(even_of_first, even_of_last);
        columns[column + 4] = _mm512_shuffle_i32x4::<0x88>(odd_of_first, odd_of_last);
        columns[column + 8] = _mm512_shuffle_i32x4::<0xdd>(even_of_first, even_of_last);
        columns[column + 12] = _mm512_shuffle_i32x4::<0xdd>(odd_of_first, odd_of_last);
    }
    columns
}

#[cfg(test)]
mod tests {
    use gemmkit::kernel::{Bf16DotGemmF32, KernelFamily};

    use super::*;
    use crate::matmul::multiplies_bf16;

    /// Compares panels with gemmkit's. Between the lanes are elements that are not theirs.
    fn check<const WIDTH: usize>(count: usize, inner: usize) {
        let len = count.next_multiple_of(WIDTH) * inner.next_multiple_of(2);
        let guard = bf16::NAN;
        for (stride, inner_stride) in [(inner + 3, 1), (1, count + 3)] {
            let mut elements = vec![guard; (count - 1) * stride + (inner - 1) * inner_stride + 1];
            for place in (0..count).flat_map(|lane| (0..inner).map(move |it| (lane, it))) {
                let bits = u16::try_from(1 + place.0 * 151 + place.1).expect("a small number");
                elements[place.0 * stride + place.1 * inner_stride] = bf16::from_bits(bits);
            }
            let first = elements.as_ptr();
            let [stride, inner_stride] = [stride, inner_stride].map(usize::cast_signed);
            let mut expected = vec![guard; len];
            // SAFETY: K-8, the lanes are those of a matrix, and the panels have room.
            unsafe {
                Bf16DotGemmF32::pack_lhs(
                    expected.as_mut_ptr(),
                    first,
                    stride,
                    inner_stride,
                    count,
                    inner,
                    WIDTH,
                );
            }
            let mut panels = vec![guard; len + 32];
            let lanes = Lanes { first, count, inner, stride, inner_stride };
            // SAFETY: K-8, as above.
            unsafe { pack::<WIDTH>(panels.as_mut_ptr(), lanes) };
            let (panels, behind) = panels.split_at(len);
            assert_eq!(panels, expected, "{lanes:?}");
            assert!(behind.iter().all(|it| it.is_nan()), "{lanes:?}");
        }
    }

    #[test]
    fn panels_are_those_of_gemmkit() {
        if !multiplies_bf16() {
            return;
        }
        for count in [1, 2, 11, 12, 13, 16, 17, 24, 31, 32, 33, 70] {
            for inner in [1, 2, 3, 15, 31, 32, 33, 64, 67, 150] {
                check::<12>(count, inner);
                check::<32>(count, inner);
            }
        }
    }
}
