//! Whether the libraries of the system are there. The bindings panic where they are not, so this is asked first.

use std::mem::ManuallyDrop;
use std::sync::OnceLock;

use libloading::Library;

use super::error::CudaError;

/// The names under which the driver and the compiler are installed, those first that the bindings would find first.
const DRIVER: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
const COMPILER: [&str; 3] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"];

/// Whether the driver can be loaded.
///
/// # Errors
/// [`CudaError::MissingLibrary`].
pub(super) fn check_driver() -> Result<(), CudaError> {
    static CHECKED: OnceLock<Result<(), CudaError>> = OnceLock::new();
    CHECKED.get_or_init(|| check("libcuda", "the driver, installed with it", &DRIVER)).clone()
}

/// Whether the compiler of kernels can be loaded.
///
/// # Errors
/// [`CudaError::MissingLibrary`].
pub(super) fn check_compiler() -> Result<(), CudaError> {
    static CHECKED: OnceLock<Result<(), CudaError>> = OnceLock::new();
    let purpose = "the compiler of kernels, in the CUDA toolkit or the package nvidia-cuda-nvrtc";
    CHECKED.get_or_init(|| check("libnvrtc", purpose, &COMPILER)).clone()
}

fn check(
    library: &'static str,
    purpose: &'static str,
    names: &[&'static str],
) -> Result<(), CudaError> {
    let mut tried = Vec::new();
    for name in names {
        // SAFETY: CU-1, the system's own library is loaded, as the bindings will in a moment.
        match unsafe { Library::new(*name) } {
            Ok(found) => {
                // Unloading it would run its destructors, and the bindings load it again.
                let _kept = ManuallyDrop::new(found);
                return Ok(());
            }
            Err(error) => tried.push(format!("{name} ({error})")),
        }
    }
    Err(CudaError::MissingLibrary { library, purpose, tried })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_told_with_what_was_tried() {
        let missing = check("libnothing", "nothing", &["libnothing.so", "libnothing.so.1"]);
        let said = missing.expect_err("it is not there").to_string();
        assert!(said.starts_with("libnothing cannot be loaded (nothing): tried "), "{said}");
        assert!(said.contains("libnothing.so (") && said.contains("libnothing.so.1 ("), "{said}");
    }
}
