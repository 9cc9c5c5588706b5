//! Loops that are compiled for several widths of vectors.
//!
//! Kernels are plain Rust loops that the compiler vectorizes. The build targets any x86-64 machine,
//! which has vectors of four f32. Most machines have vectors of eight or more, so each kernel is
//! compiled a second time for AVX2, and kernels that round to bf16 a third time for AVX-512. The
//! version is chosen at run time. All give the same bits: the compiler neither reorders
//! floating-point operations nor fuses a multiplication with an addition, whatever the width of the
//! vectors.
//!
//! Rounding to bf16 takes so many instructions that it can take longer than reading the elements
//! from memory. AVX-512 has fewer, since each rounds sixteen elements and a mask selects the NaN.
//! Most other kernels gain nothing from it, and AdamW takes 1.9 times as long in the caches of a
//! Zen 4 ([record](../../benches/records/2026-11-29-two-core-epyc/README.md)).

/// Greatest width of vectors for which a loop is compiled, as a number of f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    /// The vectors of AVX2.
    Eight = 8,
    /// The vectors of AVX-512, or those of AVX2 on machines without them.
    Sixteen = 16,
}

/// Runs loops with vectors of eight f32 on machines that have them, if the compiler inlines the
/// loops here: they and all functions that they call should be `#[inline(always)]`. A function that
/// is not inlined is compiled without AVX2. The result is the same with any vectors.
pub fn vectorized<R>(loops: impl FnOnce() -> R) -> R {
    vectorized_to(Width::Eight, loops)
}

/// Runs loops as [`vectorized`] does, with the widest vectors of this machine up to `width`.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "one width"))]
pub(crate) fn vectorized_to<R>(width: Width, loops: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if width == Width::Sixteen && has_avx512() {
        // SAFETY: K-2, the condition saw these features on this machine.
        return unsafe { run_with_avx512(loops) };
    }
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: K-2, the condition saw AVX2 on this machine.
        return unsafe { run_with_avx2(loops) };
    }
    loops()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn run_with_avx512<R>(loops: impl FnOnce() -> R) -> R {
    loops()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_with_avx2<R>(loops: impl FnOnce() -> R) -> R {
    loops()
}

/// Returns whether this machine has vectors of sixteen f32, and masks for vectors of all widths.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_allowed(Width::Sixteen)
        && std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512dq")
        && std::arch::is_x86_feature_detected!("avx512vl")
}

/// Returns whether this machine has vectors of eight f32.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx2() -> bool {
    is_allowed(Width::Eight) && std::arch::is_x86_feature_detected!("avx2")
}

/// Returns whether this machine converts f16 by an instruction.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_f16c() -> bool {
    has_avx2() && std::arch::is_x86_feature_detected!("f16c")
}

/// Returns whether this machine multiplies pairs of bf16.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx512_bf16() -> bool {
    has_avx512() && std::arch::is_x86_feature_detected!("avx512bf16")
}

/// Returns whether vectors of this width are used where the machine has them. A test can forbid
/// them.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(test), expect(unused_variables, reason = "only a test forbids a width"))]
fn is_allowed(width: Width) -> bool {
    #[cfg(test)]
    if width as usize > tests::widest() {
        return false;
    }
    true
}

#[cfg(test)]
pub(crate) mod tests;
