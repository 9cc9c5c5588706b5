//! Casts whose stores go past the caches, for results that are too large to stay there.
//!
//! An ordinary store first reads the line that it is about to overwrite. What fills a whole buffer larger than the caches
//! pays a third of its traffic for that, and drives out what is still of use.

use bytemuck::{cast_slice, cast_slice_mut};

use crate::convert::{BLOCK, cast};
use crate::element::Element;
use crate::values::ValuesMut;

/// Copies f32 into the dtype of `target`, as [`cast`] does, past the caches where the machine can.
///
/// Others see what was written once they have synchronized with this thread, as with ordinary stores.
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn cast_past_caches(target: ValuesMut<'_>, source: &[f32]) {
    assert_eq!(target.len(), source.len(), "cast past caches: lengths of target and source");
    match target {
        ValuesMut::F32(target) => copy(cast_slice_mut(target), cast_slice(source)),
        ValuesMut::F16(target) => {
            in_blocks(target, source, |block, source| cast(ValuesMut::F16(block), source));
        }
        ValuesMut::BF16(target) => {
            in_blocks(target, source, |block, source| cast(ValuesMut::BF16(block), source));
        }
    }
    fence();
}

/// Copies elements of any type past the caches where the machine can.
///
/// Others see what was written as after [`cast_past_caches`].
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn copy_past_caches<T: Element>(target: &mut [T], source: &[T]) {
    assert_eq!(target.len(), source.len(), "copy past caches: lengths of target and source");
    copy(cast_slice_mut(target), cast_slice(source));
    fence();
}

/// Rounds block after block in the first-level cache, and copies it from there.
fn in_blocks<T: bytemuck::Pod>(target: &mut [T], source: &[f32], cast: impl Fn(&mut [T], &[f32])) {
    let mut block = [T::zeroed(); BLOCK];
    for (target, source) in target.chunks_mut(BLOCK).zip(source.chunks(BLOCK)) {
        let block = &mut block[..source.len()];
        cast(block, source);
        copy(cast_slice_mut(target), cast_slice(block));
    }
}

fn copy(target: &mut [u8], source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        // SAFETY: K-2, the condition saw AVX2 on this machine.
        return unsafe { avx2::copy(target, source) };
    }
    target.copy_from_slice(source);
}

/// Makes stores past the caches as visible as others are.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        // SAFETY: K-2, the condition saw AVX2 on this machine.
        unsafe { avx2::fence() };
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_stream_si256};

    use bytemuck::must_cast;

    const ROW: usize = size_of::<__m256i>();

    #[target_feature(enable = "avx2")]
    pub(super) fn copy(target: &mut [u8], source: &[u8]) {
        let before = target.as_ptr().align_offset(ROW).min(target.len());
        let (head, body) = target.split_at_mut(before);
        let (source_head, source) = source.split_at(before);
        head.copy_from_slice(source_head);
        let (rows, rest) = body.as_chunks_mut::<ROW>();
        let (sources, source_rest) = source.as_chunks::<ROW>();
        for (row, source) in rows.iter_mut().zip(sources) {
            // SAFETY: K-5, a row is aligned, and wholly inside the target.
            unsafe { _mm256_stream_si256(row.as_mut_ptr().cast(), must_cast(*source)) };
        }
        rest.copy_from_slice(source_rest);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn fence() {
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn numbers(len: usize) -> Vec<f32> {
        (0..len).map(|index| 1.0 + index as f32 / 3.0).collect()
    }

    #[test]
    fn every_length_and_alignment_is_what_a_cast_gives() {
        for (start, len) in (0..9).flat_map(|start| (0..70).map(move |len| (start, len))) {
            let source = numbers(len);
            let (mut target, mut expected) = (vec![-1.0; len + 20], vec![-1.0; len + 20]);
            cast_past_caches(ValuesMut::F32(&mut target[start..start + len]), &source);
            cast(ValuesMut::F32(&mut expected[start..start + len]), &source);
            assert_eq!(target, expected, "{len} elements from {start}");
        }
    }

    #[test]
    fn any_elements_are_copied() {
        for (start, len) in (0..5).flat_map(|start| (0..70).map(move |len| (start, len))) {
            let source: Vec<u64> = (0..len as u64).collect();
            let mut target = vec![99; len + 9];
            copy_past_caches(&mut target[start..start + len], &source);
            assert_eq!(target[start..start + len], source);
            assert!(target[..start].iter().chain(&target[start + len..]).all(|it| *it == 99));
            let source: Vec<u16> = (0..70).map(|it| it * 7).collect();
            let source: Vec<f16> = source[..len].iter().map(|it| f16::from_bits(*it)).collect();
            let mut target = vec![f16::ONE; len + 9];
            copy_past_caches(&mut target[start..start + len], &source);
            assert_eq!(target[start..start + len], source);
        }
    }

    #[test]
    fn sixteen_bits_are_rounded_as_a_cast_rounds_them_over_the_blocks() {
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5] {
            let source = numbers(len);
            let (mut halves, mut expected) = (vec![f16::ZERO; len], vec![f16::ZERO; len]);
            cast_past_caches(ValuesMut::F16(&mut halves), &source);
            cast(ValuesMut::F16(&mut expected), &source);
            assert_eq!(halves, expected);
            let (mut brains, mut expected) = (vec![bf16::ZERO; len], vec![bf16::ZERO; len]);
            cast_past_caches(ValuesMut::BF16(&mut brains), &source);
            cast(ValuesMut::BF16(&mut expected), &source);
            assert_eq!(brains, expected);
        }
    }
}
