//! Checks that the libraries of the system can be loaded. The bindings panic where they are
//! missing, so this is checked first.

use std::error::Error as _;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;

use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};
use libloading::Library;

use crate::cuda::{Architecture, CudaError};

/// The file names of the driver and the compiler, in the order in which the bindings try them.
const DRIVER: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
const COMPILER: [&str; 3] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"];

/// Checks that the driver can be loaded.
///
/// # Errors
/// [`CudaError::MissingLibrary`] if it cannot.
pub(super) fn check_driver() -> Result<(), CudaError> {
    static CHECKED: OnceLock<Result<(), CudaError>> = OnceLock::new();
    CHECKED.get_or_init(|| check("libcuda", "part of the NVIDIA driver", &DRIVER)).clone()
}

/// Checks that the compiler of kernels can be loaded.
///
/// # Errors
/// [`CudaError::MissingLibrary`] if it cannot.
pub(super) fn check_compiler() -> Result<(), CudaError> {
    static CHECKED: OnceLock<Result<(), CudaError>> = OnceLock::new();
    let purpose = "compiles kernels; part of the CUDA toolkit and the package nvidia-cuda-nvrtc";
    CHECKED.get_or_init(|| check("libnvrtc", purpose, &COMPILER)).clone()
}

fn check(
    library: &'static str,
    purpose: &'static str,
    names: &[&'static str],
) -> Result<(), CudaError> {
    open(library, purpose, names, |found| {
        // Unloading it would run its destructors, and the bindings load it again.
        let _kept = ManuallyDrop::new(found);
        Ok(())
    })
}

/// Loads the first library of these names that is there and that `take` takes. Its name and its
/// purpose are for the error.
///
/// # Errors
/// [`CudaError::MissingLibrary`] if there is none, with the reason for each.
pub(super) fn open<T>(
    library: &'static str,
    purpose: &'static str,
    names: &[&'static str],
    take: impl Fn(Library) -> Result<T, libloading::Error>,
) -> Result<T, CudaError> {
    let mut tried = Vec::new();
    for name in names {
        // SAFETY: CU-1, this is the system's own library, for its own purpose.
        match unsafe { Library::new(*name) }.and_then(&take) {
            Ok(taken) => return Ok(taken),
            Err(error) => tried.push(format!("{name} ({})", reason(&error))),
        }
    }
    Err(CudaError::MissingLibrary { library, purpose, tried })
}

/// The words of the system's loader, which names files and functions; the error itself says only
/// which call failed.
fn reason(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// All files of `kernels/cuda` that a device runs, in order. The others use the first.
const SOURCE: &str = concat!(
    include_str!("../../../cuda/number.cuh"),
    include_str!("../../../cuda/pack.cu"),
    include_str!("../../../cuda/sum.cu"),
    include_str!("../../../cuda/inspect.cu"),
    include_str!("../../../cuda/update.cu"),
    include_str!("../../../cuda/muon.cu"),
);

/// Compiles all kernels to PTX, for devices of `architecture` and newer ones.
///
/// # Errors
/// [`CudaError::MissingLibrary`] if NVRTC cannot be loaded; [`CudaError::Compile`] with its log if
/// it reports an error.
pub fn compile(architecture: Architecture) -> Result<String, CudaError> {
    check_compiler()?;
    let options = CompileOptions {
        // Rust never contracts a * b + c into one operation, so the kernels must not, either.
        fmad: Some(false),
        options: vec![format!("--gpu-architecture={architecture}")],
        name: Some("hsdp.cu".to_owned()),
        ..CompileOptions::default()
    };
    let ptx = compile_ptx_with_opts(SOURCE, options);
    Ok(ptx.map_err(|error| refused(architecture, &error))?.to_src())
}

fn refused(architecture: Architecture, error: &CompileError) -> CudaError {
    let log = match error {
        CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
        other => format!("{other:?}"),
    };
    CudaError::Compile { architecture: architecture.to_string(), log }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_told_with_what_was_tried() {
        let missing = check("libnothing", "nothing", &["libnothing.so", "libnothing.so.1"]);
        let said = missing.expect_err("it is not there").to_string();
        assert!(said.starts_with("libnothing cannot be loaded (nothing): tried "), "{said}");
        assert!(said.contains("libnothing.so (libnothing.so: "), "{said}");
        assert!(said.contains("libnothing.so.1 (libnothing.so.1: "), "{said}");
    }
}
