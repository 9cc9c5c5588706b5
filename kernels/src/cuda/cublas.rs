//! Products of matrices by cuBLAS.

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::device::{Architecture, Device};
use super::error::CudaError;
use super::product::{DeviceMatrix, MatrixProduct, Product, Stored};
use super::stream::Stream;
use crate::memory::{self, Category};

/// Products by cuBLAS, which is loaded at run time. Products of f32 have the full precision of f32, without TF32; those of bf16 are summed in
/// f32. On one device, with one version of cuBLAS, the bits are the same in each run.
///
/// It has a workspace of the size that NVIDIA recommends, 32 MiB from `compute_90` on, and otherwise 4 MiB: a product allocates nothing. The
/// workspace is in no category of memory.
#[derive(Debug)]
pub struct Cublas {
    workspace: DeviceBuffer,
}

/// A product of matrices that are stored by columns, of f32 or bf16, with addresses of the device.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only the driver reads it"))]
pub(super) struct Gemm {
    pub(super) dtype: DType,
    pub(super) target: u64,
    /// The rows and the columns of the target, and the columns of the first factor.
    pub(super) sizes: [usize; 3],
    pub(super) factors: [Operand; 2],
    /// The factors of the product, and of the target.
    pub(super) scales: [f32; 2],
    /// Address and bytes.
    pub(super) workspace: (u64, usize),
}

/// A factor of a product.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only the driver reads it"))]
pub(super) struct Operand {
    pub(super) address: u64,
    /// How it is stored, with the elements from a row or a column to the next.
    pub(super) stored: (Stored, usize),
}

impl Cublas {
    /// Loads cuBLAS, the first time on a device, and takes memory for the workspace.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] if cuBLAS cannot be loaded, or a function that it should have; [`CudaError::Library`] if it refuses the
    /// device; [`CudaError::OutOfMemory`] if the device has no memory for the handle or the workspace; [`CudaError::Driver`] if a call of the driver fails.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.blas()?;
        let _other = memory::scope(Category::Other);
        let elements = workspace(device.architecture()) / size_of::<f32>();
        let workspace = DeviceBuffer::new(device, DType::F32, elements, "cuBLAS's workspace")?;
        Ok(Self { workspace })
    }
}

/// The bytes of a workspace.
fn workspace(architecture: Architecture) -> usize {
    if architecture >= Architecture(90) { 32 << 20 } else { 4 << 20 }
}

impl MatrixProduct for Cublas {
    fn multiply(&mut self, stream: &Stream, product: Product<'_>) -> Result<(), CudaError> {
        product.check()?;
        let Product { target: (target, start), left, right, take, keep } = product;
        let (rows, columns) = (left.sizes.0, right.sizes.1);
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        // cuBLAS stores matrices by columns. So it computes the transpose of the product, whose columns are the target's rows.
        let gemm = Gemm {
            dtype: target.dtype(),
            target: target.address(start),
            sizes: [columns, rows, left.sizes.1],
            factors: [operand(right.t()), operand(left.t())],
            scales: [take, keep],
            workspace: (self.workspace.address(0), self.workspace.len() * size_of::<f32>()),
        };
        let blas = stream.device().blas()?;
        let writes = &mut [target, &mut self.workspace];
        stream.enqueue((&[left.buffer, right.buffer], writes), |raw| {
            // SAFETY: CU-8, the matrices lie within their buffers, as was checked, and the workspace is a whole buffer.
            unsafe { blas.multiply(raw, &gemm) }
        })
    }
}

fn operand(matrix: DeviceMatrix<'_>) -> Operand {
    let stored = (matrix.stored, matrix.stride().max(1));
    Operand { address: matrix.buffer.address(matrix.start), stored }
}
