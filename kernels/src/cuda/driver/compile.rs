//! Compilation of the kernels to PTX by NVRTC.

use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};

use super::libraries::check_compiler;
use crate::cuda::{Architecture, CudaError};

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
/// [`CudaError::MissingLibrary`] if NVRTC cannot be loaded; [`CudaError::Compile`] with its log if it reports an error.
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
