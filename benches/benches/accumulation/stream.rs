//! Stores that go past the caches, for what is written and not read soon.

/// Copies, past the caches where the machine can: as fast as memory takes it.
pub(crate) fn copy(target: &mut [f32], source: &[f32]) {
    assert_eq!(target.len(), source.len(), "a copy has as many elements");
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the machine has AVX, and the lengths are equal.
        return unsafe { avx::copy(target, source) };
    }
    target.copy_from_slice(source);
}

#[cfg(target_arch = "x86_64")]
mod avx {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_ps, _mm256_stream_ps};

    const LANES: usize = 8;

    /// # Safety
    /// The machine has AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy(target: &mut [f32], source: &[f32]) {
        let unaligned = target.as_ptr().align_offset(LANES * size_of::<f32>()).min(target.len());
        let (head, body) = target.split_at_mut(unaligned);
        head.copy_from_slice(&source[..unaligned]);
        let (mut targets, mut sources) =
            (body.chunks_exact_mut(LANES), source[unaligned..].chunks_exact(LANES));
        for (target, source) in targets.by_ref().zip(sources.by_ref()) {
            // SAFETY: eight elements are read.
            let values = unsafe { _mm256_loadu_ps(source.as_ptr()) };
            // SAFETY: eight elements are written, at an address that is a multiple of 32.
            unsafe { _mm256_stream_ps(target.as_mut_ptr(), values) };
        }
        targets.into_remainder().copy_from_slice(sources.remainder());
        _mm_sfence();
    }
}
