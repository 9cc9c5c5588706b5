//! Copies with stores that bypass the caches, for results that are too large to stay in them.
//!
//! An ordinary store first reads the cache line that it overwrites. For a copy into a buffer larger
//! than the caches, this is a third of the memory traffic, and it evicts lines that are still in
//! use.

use bytemuck::{cast_slice, cast_slice_mut};

use crate::element::Element;
use crate::values::{Values, ValuesMut};

/// Copies elements with stores that bypass the caches, on machines with AVX2; otherwise with an
/// ordinary copy.
///
/// Other threads see the written elements once they have synchronized with this thread, as with
/// ordinary stores.
///
/// # Panics
///
/// If `target` and `source` differ in length.
pub fn copy_past_caches<T: Element>(target: &mut [T], source: &[T]) {
    assert_eq!(target.len(), source.len(), "copy past caches: lengths of target and source differ");
    let _fence = Fence;
    copy_elements(target, source);
}

/// Copies each source into its target, as [`copy_past_caches`] does, for elements of f32, f16 or
/// bf16.
///
/// The call waits for its stores once, at the end. To wait after each of many small pieces would
/// take longer than the pieces.
///
/// # Panics
///
/// If a target and its source differ in dtype or length.
pub fn copy_all_past_caches<'a>(copies: impl IntoIterator<Item = (ValuesMut<'a>, Values<'a>)>) {
    let _fence = Fence;
    for (target, source) in copies {
        assert_eq!(
            target.len(),
            source.len(),
            "copy past caches: lengths of target and source differ"
        );
        match (target, source) {
            (ValuesMut::F32(target), Values::F32(source)) => copy_elements(target, source),
            (ValuesMut::F16(target), Values::F16(source)) => copy_elements(target, source),
            (ValuesMut::BF16(target), Values::BF16(source)) => copy_elements(target, source),
            (target, source) => {
                panic!("cannot copy {} elements into {}", source.dtype(), target.dtype())
            }
        }
    }
}

fn copy_elements<T: Element>(target: &mut [T], source: &[T]) {
    copy(cast_slice_mut(target), cast_slice(source));
}

fn copy(target: &mut [u8], source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        // SAFETY: K-2, the condition saw AVX2 on this machine.
        return unsafe { avx2::copy(target, source) };
    }
    target.copy_from_slice(source);
}

/// When dropped, makes the stores that bypass the caches as visible as ordinary ones. So a panic in
/// between is covered.
struct Fence;

impl Drop for Fence {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if crate::simd::has_avx2() {
            // SAFETY: K-2, the condition saw AVX2 on this machine.
            unsafe { avx2::fence() };
        }
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
    use half::bf16;

    use super::*;

    fn numbers(len: usize) -> Vec<u16> {
        (0..len).map(|index| (index * 40_503 % 65_521).try_into().expect("below 65536")).collect()
    }

    #[test]
    fn every_length_and_alignment_is_what_a_copy_gives() {
        for (start, len) in (0..17).flat_map(|start| (0..70).map(move |len| (start, len))) {
            let source: Vec<bf16> = numbers(len).into_iter().map(bf16::from_bits).collect();
            let mut target = vec![bf16::ONE; len + 20];
            let mut expected = vec![bf16::ONE; len + 20];
            let range = start..(start + len).min(len + 20);
            let source = Values::BF16(&source[..range.len()]);
            copy_all_past_caches([(ValuesMut::BF16(&mut target[range.clone()]), source)]);
            ValuesMut::BF16(&mut expected[range]).copy_from(source);
            let bits =
                |values: Vec<bf16>| values.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(target), bits(expected), "{len} elements from {start}");
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
        }
    }

    #[test]
    fn every_dtype_is_copied() {
        use half::f16;
        let source: Vec<f32> = numbers(1000).into_iter().map(f32::from).collect();
        let mut target = vec![0.0; 1000];
        copy_all_past_caches([(ValuesMut::F32(&mut target), Values::F32(&source))]);
        assert_eq!(target, source);
        let source: Vec<f16> = source.into_iter().map(f16::from_f32).collect();
        let mut target = vec![f16::ZERO; 1000];
        copy_all_past_caches([(ValuesMut::F16(&mut target), Values::F16(&source))]);
        assert_eq!(target, source);
    }

    #[test]
    fn pieces_of_any_length_side_by_side() {
        let source: Vec<f32> = numbers(3000).into_iter().map(f32::from).collect();
        let mut target = vec![0.0; 3000];
        let mut rest = &mut target[..];
        let mut copies = Vec::new();
        let mut from = &source[..];
        while !from.is_empty() {
            let len = (copies.len() % 23).min(from.len());
            let (piece, after) = rest.split_at_mut(len);
            copies.push((ValuesMut::F32(piece), Values::F32(&from[..len])));
            (rest, from) = (after, &from[len..]);
        }
        copy_all_past_caches(copies);
        assert_eq!(target, source);
    }

    #[test]
    #[should_panic(expected = "lengths of target and source")]
    fn pieces_of_other_lengths_than_their_sources_are_refused() {
        let mut target = [0.0; 4];
        copy_all_past_caches([(ValuesMut::F32(&mut target), Values::F32(&[1.0; 3]))]);
    }

    #[test]
    #[should_panic(expected = "cannot copy f32 elements into bf16")]
    fn nothing_is_converted() {
        copy_all_past_caches([(ValuesMut::BF16(&mut [bf16::ZERO]), Values::F32(&[1.0]))]);
    }
}
