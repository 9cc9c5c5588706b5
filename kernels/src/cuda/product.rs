//! Products of matrices in the memory of a device, by cuBLAS.

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::device::{Architecture, Device};
use super::error::CudaError;
use super::stream::Stream;
use crate::memory::{self, Category};

/// Products of two matrices each: `target = take * left right + keep * target`. All elements are
/// f32, or all are bf16.
#[derive(Debug)]
pub struct Product<'a> {
    /// The number of products. Target, left and right matrix of each follow those of the product
    /// before it without gaps.
    pub count: usize,
    /// The buffer of the targets. The rows of each are one after the other. With `keep` 0 they are
    /// not read.
    pub target: &'a mut DeviceBuffer,
    /// The first element of the first target in its buffer.
    pub start: usize,
    /// The left matrix of the first product.
    pub left: DeviceMatrix<'a>,
    /// The right matrix of the first product, with as many rows as the left one has columns.
    pub right: DeviceMatrix<'a>,
    /// The factor of each product.
    pub take: f32,
    /// The factor of each target.
    pub keep: f32,
}

/// A matrix in a device buffer, without gaps.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMatrix<'a> {
    /// The buffer.
    pub buffer: &'a DeviceBuffer,
    /// The first element.
    pub start: usize,
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub columns: usize,
    /// The order of its elements.
    pub stored: Stored,
}

/// Matrices of one shape in a device buffer that an operation replaces. They follow one another,
/// stored by rows, without gaps.
#[derive(Debug)]
pub struct DeviceMatrices<'a> {
    /// The buffer.
    pub buffer: &'a mut DeviceBuffer,
    /// The first element of the first matrix.
    pub start: usize,
    /// The number of matrices.
    pub count: usize,
    /// The number of rows of each.
    pub rows: usize,
    /// The number of columns of each.
    pub columns: usize,
}

/// The order of the elements of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// One row after the other.
    ByRows,
    /// One column after the other: as the transpose is stored by rows.
    ByColumns,
}

impl<'a> DeviceMatrix<'a> {
    /// The transpose, in the same memory.
    #[must_use]
    pub fn t(self) -> Self {
        let stored = match self.stored {
            Stored::ByRows => Stored::ByColumns,
            Stored::ByColumns => Stored::ByRows,
        };
        Self { rows: self.columns, columns: self.rows, stored, ..self }
    }

    /// The elements from the first of a row to the first of the next; or of columns, if columns are
    /// stored one after the other.
    #[must_use]
    pub fn stride(&self) -> usize {
        match self.stored {
            Stored::ByRows => self.columns,
            Stored::ByColumns => self.rows,
        }
    }
}

impl Product<'_> {
    /// Checks that the matrices fit each other, lie within their buffers, and are all of f32 or all
    /// of bf16.
    fn check(&self) -> Result<(), CudaError> {
        let &Self { count, ref left, ref right, .. } = self;
        let dtype = self.target.dtype();
        let buffer = &*self.target;
        let target = DeviceMatrix { buffer, start: self.start, columns: right.columns, ..*left };
        if left.columns != right.rows {
            return refuse(format!(
                "the left matrix has {} columns, the right {} rows",
                left.columns, right.rows
            ));
        }
        if !matches!(dtype, DType::F32 | DType::BF16) {
            return refuse(format!("the target is {dtype}, but must be f32 or bf16"));
        }
        for (operand, matrix) in
            [("the target", &target), ("the left matrix", left), ("the right matrix", right)]
        {
            let &DeviceMatrix { buffer, start, rows, columns, .. } = matrix;
            let len = buffer.len();
            let own = buffer.dtype();
            let one = rows.checked_mul(columns);
            let all = one.and_then(|one| one.checked_mul(count));
            let end = all.and_then(|all| start.checked_add(all));
            if own != dtype || end.is_none_or(|end| end > len) {
                return refuse(format!(
                    "{operand}, {count} x {rows} x {columns} of {dtype} from element {start} on, does not lie in a buffer \
                     of {len} elements of {own}"
                ));
            }
        }
        Ok(())
    }
}

fn refuse(problem: String) -> Result<(), CudaError> {
    Err(CudaError::Mismatch { operation: "multiply matrices", problem })
}

/// Products by cuBLAS, which is loaded at run time. Products of f32 have the full precision of f32,
/// without TF32; those of bf16 are summed in f32. On one device, with one version of cuBLAS, the
/// bits are the same in each run.
///
/// It has a workspace of the size that NVIDIA recommends, 32 MiB from `compute_90` on, and
/// otherwise 4 MiB: a product allocates nothing. The workspace is in no category of memory.
#[derive(Debug)]
pub struct Cublas {
    workspace: DeviceBuffer,
}

/// Products of matrices that are stored by columns, of f32 or bf16, with addresses of the device.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only the driver reads it"))]
pub(super) struct Gemm {
    pub(super) dtype: DType,
    pub(super) count: usize,
    /// The first target. The others follow without gaps.
    pub(super) target: u64,
    /// The rows and the columns of each target, and the columns of each first factor.
    pub(super) sizes: [usize; 3],
    /// The factors of the first product.
    pub(super) factors: [Operand; 2],
    /// The factors of each product, and of each target.
    pub(super) scales: [f32; 2],
    /// The address of the workspace.
    pub(super) workspace: u64,
    /// The bytes of the workspace.
    pub(super) workspace_bytes: usize,
}

/// A factor of a product.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only the driver reads it"))]
pub(super) struct Operand {
    pub(super) address: u64,
    pub(super) stored: Stored,
    /// The elements from a row or a column to the next.
    pub(super) stride: usize,
    /// The elements from the factor of a product to that of the next.
    pub(super) to_next: usize,
}

impl Cublas {
    /// Loads cuBLAS, the first time on a device, and takes memory for the workspace.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] if cuBLAS cannot be loaded, or a function that it should have;
    /// [`CudaError::Library`] if it refuses the device; [`CudaError::OutOfMemory`] if the device
    /// has no memory for the handle or the workspace; [`CudaError::Driver`] if a call of the driver
    /// fails.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.blas()?;
        let _other = memory::scope(Category::Other);
        let elements = workspace(device.architecture()) / size_of::<f32>();
        let workspace = DeviceBuffer::new(device, DType::F32, elements, "cuBLAS's workspace")?;
        Ok(Self { workspace })
    }

    /// Issues products on `stream`, through [`Stream::enqueue`]. Each element of a product is a sum
    /// in f32 over products of two elements, in any order. It is multiplied, added and rounded to
    /// the dtype of the target once.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the matrices do not fit each other, do not lie within their
    /// buffers, or are not all of f32 or all of bf16; [`CudaError::Library`] if a call of cuBLAS
    /// fails; [`CudaError::Driver`] if a call of the driver fails.
    pub fn multiply(&mut self, stream: &Stream, product: Product<'_>) -> Result<(), CudaError> {
        product.check()?;
        let Product { count, target, start, left, right, take, keep } = product;
        let rows = left.rows;
        let columns = right.columns;
        if count == 0 || rows == 0 || columns == 0 {
            return Ok(());
        }
        // cuBLAS stores matrices by columns. So it computes the transpose of each product, whose
        // columns are the target's rows.
        let gemm = Gemm {
            dtype: target.dtype(),
            count,
            target: target.address(start),
            sizes: [columns, rows, left.columns],
            factors: [operand(right.t()), operand(left.t())],
            scales: [take, keep],
            workspace: self.workspace.address(0),
            workspace_bytes: self.workspace.len() * size_of::<f32>(),
        };
        let blas = stream.device().blas()?;
        let writes = &mut [target, &mut self.workspace];
        stream.enqueue(&[left.buffer, right.buffer], writes, |raw| {
            // SAFETY: CU-8, the matrices lie within their buffers, as was checked, and the
            // workspace is a whole buffer.
            unsafe { blas.multiply(raw, &gemm) }
        })
    }
}

/// The bytes of a workspace.
fn workspace(architecture: Architecture) -> usize {
    if architecture >= Architecture(90) { 32 << 20 } else { 4 << 20 }
}

fn operand(matrix: DeviceMatrix<'_>) -> Operand {
    Operand {
        address: matrix.buffer.address(matrix.start),
        stored: matrix.stored,
        // cuBLAS refuses 0, also for a factor without elements.
        stride: matrix.stride().max(1),
        to_next: (matrix.rows * matrix.columns).max(1),
    }
}
