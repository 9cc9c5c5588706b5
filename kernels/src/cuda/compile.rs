//! Compilation of the kernels to PTX by NVRTC.

use std::fmt;

use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use super::error::CudaError;
use super::libraries::check_compiler;
use super::source::SOURCE;

/// A virtual architecture of CUDA: 90 is `compute_90`, that of an H100 or H200. Displayed as `compute_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture(pub u32);

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "compute_{}", self.0)
    }
}

/// Compiles all kernels to PTX, for devices of `architecture` and newer ones.
///
/// # Errors
/// [`CudaError::MissingLibrary`] if NVRTC cannot be loaded; [`CudaError::Compile`] with its log if it reports an error.
pub fn compile(architecture: Architecture) -> Result<Ptx, CudaError> {
    check_compiler()?;
    let options = CompileOptions {
        // Rust never contracts a * b + c into one operation, so the kernels must not, either.
        fmad: Some(false),
        options: vec![format!("--gpu-architecture={architecture}")],
        name: Some("hsdp.cu".to_owned()),
        ..CompileOptions::default()
    };
    compile_ptx_with_opts(SOURCE, options).map_err(|error| refused(architecture, &error))
}

fn refused(architecture: Architecture, error: &CompileError) -> CudaError {
    let log = match error {
        CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
        other => format!("{other:?}"),
    };
    CudaError::Compile { architecture: architecture.to_string(), log }
}
