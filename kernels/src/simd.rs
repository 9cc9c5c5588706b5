//! Loops that are compiled twice: for every x86-64, and for machines with AVX2.
//!
//! Kernels are plain Rust loops that the compiler vectorizes. The build targets any x86-64 machine,
//! which has vectors of four f32. Most machines have vectors of eight or more, so each kernel is
//! compiled a second time for AVX2, and the version is chosen at run time. Both give the same bits:
//! the compiler neither reorders floating-point operations nor fuses a multiplication with an
//! addition, whatever the width of the vectors.

/// Runs loops with the widest vectors of this machine, if the compiler inlines them here: they and
/// all functions that they call should be `#[inline(always)]`. A function that is not inlined is
/// compiled without AVX2. The result is the same with any vectors.
pub fn vectorized<R>(loops: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: K-2, the condition saw AVX2 on this machine.
        return unsafe { run_with_avx2(loops) };
    }
    loops()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_with_avx2<R>(loops: impl FnOnce() -> R) -> R {
    loops()
}

/// Whether this machine has vectors of eight f32.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx2() -> bool {
    as_it_is() && std::arch::is_x86_feature_detected!("avx2")
}

/// Whether this machine converts f16 by an instruction.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_f16c() -> bool {
    has_avx2() && std::arch::is_x86_feature_detected!("f16c")
}

/// Whether the features of this machine are used. A test can switch them off.
#[cfg(target_arch = "x86_64")]
fn as_it_is() -> bool {
    #[cfg(test)]
    if tests::narrow() {
        return false;
    }
    true
}

#[cfg(test)]
pub(crate) mod tests;
