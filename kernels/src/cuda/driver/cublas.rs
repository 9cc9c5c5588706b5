//! The calls of cuBLAS. Its functions are declared here: the bindings of the driver's crate would
//! panic where one is missing, and take a status that they do not know for one that they know.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::OnceLock;

use hsdp_sharding::DType;
use libloading::Library;
use parking_lot::Mutex;

use super::libraries::open;
use super::{CUstream, OpenDevice};
use crate::cuda::CudaError;
use crate::cuda::device::Handle;
use crate::cuda::product::{Gemm, Operand, Stored};
use crate::cuda::stream::Apart;

/// The file names of cuBLAS.
const NAMES: [&str; 3] = ["libcublas.so", "libcublas.so.13", "libcublas.so.12"];

/// `CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION`, with the default otherwise: no TF32, and all
/// sums of bf16 in f32.
const MATH: c_int = 16;
/// `CUBLAS_COMPUTE_32F`.
const SUMS: c_int = 68;
/// `CUBLAS_GEMM_DEFAULT`.
const ALGORITHM: c_int = -1;
/// `CUDA_R_32F`.
const F32: c_int = 0;
/// `CUDA_R_16BF`.
const BF16: c_int = 14;
/// `CUBLAS_OP_N` and `CUBLAS_OP_T`.
const AS_IT_IS: c_int = 0;
const TRANSPOSED: c_int = 1;

/// `CUBLAS_STATUS_ALLOC_FAILED`.
const NO_MEMORY: c_int = 3;

/// cuBLAS's handle.
type Raw = *mut c_void;

/// The functions: their fields, types and names in the library. They return statuses as integers.
macro_rules! functions {
    ($($field:ident: $of:ty = $name:literal;)*) => {
        #[derive(Clone, Copy, Debug)]
        struct CublasFunctions {
            $($field: $of,)*
        }

        impl CublasFunctions {
            /// The functions of a library, which is never unloaded.
            fn found_in(library: Library) -> Result<Self, libloading::Error> {
                let library = ManuallyDrop::new(library);
                Ok(Self {
                    $(
                        // SAFETY: CU-1, the type of the field is that of cuBLAS's function of this
                        // name.
                        $field: *unsafe { library.get::<$of>($name) }?,
                    )*
                })
            }
        }
    };
}

functions! {
    create: unsafe extern "C" fn(*mut Raw) -> c_int = b"cublasCreate_v2\0";
    set_math_mode: unsafe extern "C" fn(Raw, c_int) -> c_int = b"cublasSetMathMode\0";
    set_stream: unsafe extern "C" fn(Raw, CUstream) -> c_int = b"cublasSetStream_v2\0";
    set_workspace: unsafe extern "C" fn(Raw, *mut c_void, usize) -> c_int = b"cublasSetWorkspace_v2\0";
    gemm: GemmStridedBatchedEx = b"cublasGemmStridedBatchedEx_64\0";
    status_name: unsafe extern "C" fn(c_int) -> *const c_char = b"cublasGetStatusName\0";
}

/// The handle; the transposition of each factor; m, n and k; alpha; each factor, its dtype, its
/// stride, and the elements to the factor of the next product; beta; the target with the same; the
/// number of products; the dtype of sums; the algorithm.
type GemmStridedBatchedEx = unsafe extern "C" fn(
    Raw,
    c_int,
    c_int,
    i64,
    i64,
    i64,
    *const f32,
    *const c_void,
    c_int,
    i64,
    c_longlong,
    *const c_void,
    c_int,
    i64,
    c_longlong,
    *const f32,
    *mut c_void,
    c_int,
    i64,
    c_longlong,
    i64,
    c_int,
    c_int,
) -> c_int;

/// cuBLAS on a device. It is never destroyed, because that would wait for the device.
#[derive(Debug)]
pub(in super::super) struct Blas {
    functions: CublasFunctions,
    device: usize,
    /// Locked for the whole of a call, because precision, stream and workspace are settings of the
    /// handle.
    handle: Mutex<Handle<Raw>>,
}

impl OpenDevice {
    /// Loads cuBLAS, and makes a handle for the device.
    pub(in super::super) fn blas(&self) -> Result<Blas, CudaError> {
        let functions = functions()?;
        self.make_current()?;
        let device = self.ordinal();
        let mut raw = ptr::null_mut();
        // It takes memory of the device.
        let _apart = Apart::begin();
        // SAFETY: CU-8, the handle is written to a variable.
        let status = unsafe { (functions.create)(&raw mut raw) };
        if status == NO_MEMORY {
            let what = "a handle of cuBLAS".to_owned();
            let (free, total) = self.memory();
            return Err(CudaError::OutOfMemory { device, bytes: 0, what, free, total });
        }
        functions.told(device, "make a handle of cuBLAS", status)?;
        Ok(Blas { functions, device, handle: Mutex::new(Handle(raw)) })
    }
}

fn functions() -> Result<CublasFunctions, CudaError> {
    static LOADED: OnceLock<Result<CublasFunctions, CudaError>> = OnceLock::new();
    let purpose = "multiplies matrices; part of the CUDA toolkit and the package nvidia-cublas";
    LOADED.get_or_init(|| open("libcublas", purpose, &NAMES, CublasFunctions::found_in)).clone()
}

impl CublasFunctions {
    fn told(&self, device: usize, operation: &str, status: c_int) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: CU-8, any number may be asked for.
        let name = unsafe { (self.status_name)(status) };
        let meaning = match name.is_null() {
            true => "a status without a name".into(),
            // SAFETY: CU-8, names are texts of the library, which is never unloaded.
            false => unsafe { CStr::from_ptr(name) }.to_string_lossy(),
        };
        let library = "cuBLAS";
        let operation = operation.to_owned();
        let meaning = meaning.into_owned();
        Err(CudaError::Library { library, operation, device, code: status, meaning })
    }
}

impl Blas {
    /// Issues products on a stream; the context is current.
    ///
    /// # Safety
    /// CU-5, CU-8: the matrices lie within buffers that the stream was told, and so does the
    /// workspace.
    pub(in super::super) unsafe fn multiply(
        &self,
        stream: CUstream,
        gemm: &Gemm,
    ) -> Result<(), CudaError> {
        let told = |status| self.functions.told(self.device, "multiply matrices", status);
        let handle = self.handle.lock();
        // SAFETY: CU-8, the handle is never destroyed.
        told(unsafe { (self.functions.set_math_mode)(handle.0, MATH) })?;
        // SAFETY: CU-8, the handle is never destroyed, and the stream lives.
        told(unsafe { (self.functions.set_stream)(handle.0, stream) })?;
        // A new stream resets the workspace.
        let workspace = pointer(gemm.workspace);
        let bytes = gemm.workspace_bytes;
        // SAFETY: CU-8, the workspace is a buffer of so many bytes.
        told(unsafe { (self.functions.set_workspace)(handle.0, workspace, bytes) })?;
        // SAFETY: CU-8, the caller's promise is passed on.
        told(unsafe { self.issue(handle.0, gemm) })
    }

    /// # Safety
    /// CU-8: as for [`multiply`](Self::multiply); the handle is locked, and has its stream and its
    /// workspace.
    unsafe fn issue(&self, handle: Raw, gemm: &Gemm) -> c_int {
        let dtype = if gemm.dtype == DType::BF16 { BF16 } else { F32 };
        let [m, n, k] = gemm.sizes.map(wide);
        let [first, second] = gemm.factors;
        let [take, keep] = &gemm.scales;
        // SAFETY: CU-8, sizes and strides are those of the matrices; the scales are read before the
        // call returns.
        unsafe {
            (self.functions.gemm)(
                handle,
                transposition(first),
                transposition(second),
                m,
                n,
                k,
                take,
                pointer(first.address),
                dtype,
                wide(first.stride),
                wide(first.to_next),
                pointer(second.address),
                dtype,
                wide(second.stride),
                wide(second.to_next),
                keep,
                pointer(gemm.target),
                dtype,
                m,
                m * n,
                wide(gemm.count),
                SUMS,
                ALGORITHM,
            )
        }
    }
}

fn transposition(operand: Operand) -> c_int {
    match operand.stored {
        Stored::ByRows => TRANSPOSED,
        Stored::ByColumns => AS_IT_IS,
    }
}

/// An address of the device, as cuBLAS takes it.
fn pointer(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0))
}

fn wide(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_functions_is_told_by_the_function_that_it_lacks() {
        let names = ["libm.so.6", "libnothing.so"];
        let refused = open("libcublas", "multiplies", &names, CublasFunctions::found_in);
        let said = refused.expect_err("it lacks them").to_string();
        let begins = "libcublas cannot be loaded (multiplies): tried libm.so.6 (";
        assert!(said.starts_with(begins), "{said}");
        assert!(said.contains("cublasCreate_v2"), "{said}");
        assert!(said.contains("), libnothing.so ("), "{said}");
    }
}
