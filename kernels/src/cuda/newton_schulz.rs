//! The orthogonalization of matrices by products of cuBLAS.

use std::mem;
use std::ops::Range;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::device::{CudaKernel, Device};
use super::error::CudaError;
use super::launch::Launch;
use super::product::{Cublas, DeviceMatrix, DeviceMatrixMut, Product, Stored};
use super::stream::Stream;
use super::wire::PARTIAL;
use crate::memory::{self, Category};
use crate::round::nearest_f32;
use crate::{MatrixDType, NewtonSchulz};

/// The name of the operation in errors.
const OPERATION: &str = "orthogonalize";

/// The buffers that [`Stream::orthogonalize`] needs besides the matrix. They are large enough for
/// several matrices, one after the other. Their elements have no meaning between calls.
#[derive(Debug)]
pub struct NewtonSchulzBuffers {
    dtype: MatrixDType,
    /// A.
    gram: DeviceBuffer,
    /// B.
    polynomial: DeviceBuffer,
    /// The next X.
    next: DeviceBuffer,
    /// X in bf16. In f32, X is where the matrix is.
    rounded: Option<DeviceBuffer>,
    /// The squares of X.
    squares: DeviceBuffer,
}

impl NewtonSchulzBuffers {
    /// Takes memory of a device for iterations in `dtype` on matrices of these sizes: two squares of
    /// the largest lesser size, and as many elements as the largest matrix has, in bf16 twice as
    /// many. Their bytes count in the [scope](crate::memory::scope) of this thread; 8 KiB for the
    /// norm do not.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a matrix has more than `usize::MAX` elements;
    /// [`CudaError::OutOfMemory`] if the device has no memory left; [`CudaError::Driver`] if a call
    /// of the driver fails.
    pub fn new(
        device: &Device,
        dtype: MatrixDType,
        sizes: impl IntoIterator<Item = (usize, usize)>,
    ) -> Result<Self, CudaError> {
        let (whole, square) = largest(sizes)?;
        let of = |dtype: DType, len, what| DeviceBuffer::new(device, dtype, len, what);
        let own = |len| of(dtype.into(), len, "a matrix that is orthogonalized");
        let rounded = (dtype == MatrixDType::BF16).then(|| own(whole)).transpose()?;
        let gram = own(square)?;
        let polynomial = own(square)?;
        let next = own(whole)?;
        let _other = memory::scope(Category::Other);
        let squares = of(DType::F32, PARTIAL, "the norm of a matrix")?;
        Ok(Self { dtype, gram, polynomial, next, rounded, squares })
    }
}

/// The most elements of a matrix, and the most of the square of a lesser size.
fn largest(sizes: impl IntoIterator<Item = (usize, usize)>) -> Result<(usize, usize), CudaError> {
    sizes.into_iter().try_fold((0, 0), |(whole, square), (rows, columns)| {
        let Some(count) = rows.checked_mul(columns) else {
            let problem = format!("a matrix of {rows} x {columns} is too large");
            return Err(CudaError::Mismatch { operation: OPERATION, problem });
        };
        // No larger than the matrix.
        let short = rows.min(columns);
        Ok((whole.max(count), square.max(short * short)))
    })
}

impl Stream {
    /// Replaces a matrix of f32 by its orthogonalization, as [`NewtonSchulz::orthogonalize`] does
    /// on the host. `buffers` are made for its size and for the dtype of the iterations.
    ///
    /// Issues products, copies and launches, and does not wait. Products are rounded where the host
    /// rounds them, and are summed in another order.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the matrix is not in its buffer, if a buffer is too small, has
    /// another dtype or is of another device; the errors of [`Cublas::multiply`];
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn orthogonalize(
        &self,
        by: &NewtonSchulz,
        matrix: DeviceMatrixMut<'_>,
        buffers: &mut NewtonSchulzBuffers,
        cublas: &mut Cublas,
    ) -> Result<(), CudaError> {
        let range = check(by, &matrix, buffers)?;
        if range.is_empty() {
            return Ok(());
        }
        let NewtonSchulzBuffers { gram, polynomial, next, rounded, squares, .. } = buffers;
        let DeviceMatrixMut { buffer: matrix, start, rows, columns } = matrix;
        self.squares(by.dtype, matrix, range.clone(), squares)?;
        self.normalize(by, matrix, range.clone(), rounded.as_mut(), squares)?;
        let own = match rounded {
            Some(rounded) => DeviceMatrixMut { buffer: rounded, start: 0, rows, columns },
            None => DeviceMatrixMut { buffer: &mut *matrix, start, rows, columns },
        };
        let x = [own, DeviceMatrixMut { buffer: next, start: 0, rows, columns }];
        let mut iteration = DeviceIteration { stream: self, x, gram, polynomial, cublas };
        let coefficients = by.coefficients.map(nearest_f32);
        (0..by.steps).try_for_each(|_| iteration.step(coefficients))?;
        let found = if by.steps.is_multiple_of(2) { rounded.as_ref() } else { Some(&*next) };
        match (found, by.dtype) {
            (None, _) => Ok(()),
            (Some(found), MatrixDType::F32) => {
                matrix.copy(self, range.clone(), found, 0..range.len())
            }
            (Some(found), MatrixDType::BF16) => self.widen(matrix, range, found),
        }
    }

    /// X = X / max(norm(X), eps), rounded.
    fn normalize(
        &self,
        by: &NewtonSchulz,
        matrix: &mut DeviceBuffer,
        range: Range<usize>,
        rounded: Option<&mut DeviceBuffer>,
        squares: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let from = matrix.address(range.start);
        let len = range.len() as u64;
        let to = rounded.as_ref().map_or(from, |rounded| rounded.address(0));
        let squared = squares.address(0);
        let launch = Launch::over(CudaKernel::Normalize(by.dtype), range.len())
            .argument(&to)
            .argument(&from)
            .argument(&len)
            .argument(&squared)
            .argument(&by.eps);
        match rounded {
            // SAFETY: CU-5, both have so many elements, and the squares are there.
            Some(rounded) => unsafe { launch.issue(self, &[matrix, squares], &mut [rounded]) },
            // SAFETY: CU-5, as above.
            None => unsafe { launch.issue(self, &[squares], &mut [matrix]) },
        }
    }
}

/// Checks that all matrices of an iteration lie in their buffers, and returns the elements of the
/// first.
fn check(
    by: &NewtonSchulz,
    matrix: &DeviceMatrixMut<'_>,
    buffers: &NewtonSchulzBuffers,
) -> Result<Range<usize>, CudaError> {
    let refuse = |problem| Err(CudaError::Mismatch { operation: OPERATION, problem });
    let &DeviceMatrixMut { ref buffer, start, rows, columns } = matrix;
    let len = buffer.len();
    buffer.check(OPERATION, DType::F32, len)?;
    let own = buffers.dtype;
    let dtype = by.dtype;
    let Some(count) = rows.checked_mul(columns).filter(|it| *it <= len && start <= len - it) else {
        return refuse(format!(
            "a matrix of {rows} x {columns} from element {start} on does not lie in {len} elements"
        ));
    };
    if own != dtype {
        return refuse(format!("iterations in {dtype} with buffers of {own}"));
    }
    let (whole, square) = largest([(rows, columns)])?;
    let most = buffers.next.len();
    let widest = buffers.gram.len();
    if whole > most || square > widest {
        return refuse(format!(
            "a matrix of {rows} x {columns}, with buffers for {most} elements and squares of {widest}"
        ));
    }
    Ok(start..start + count)
}

struct DeviceIteration<'a> {
    stream: &'a Stream,
    /// X, and the next X. They change places in each step.
    x: [DeviceMatrixMut<'a>; 2],
    /// A.
    gram: &'a mut DeviceBuffer,
    /// B.
    polynomial: &'a mut DeviceBuffer,
    cublas: &'a mut Cublas,
}

impl DeviceIteration<'_> {
    /// A = X X^T; B = b A + c A A; X = a X + B X.
    fn step(&mut self, [a, b, c]: [f32; 3]) -> Result<(), CudaError> {
        let Self { stream, x: [x, next], gram, polynomial, cublas } = self;
        let &mut DeviceMatrixMut { rows, columns, .. } = x;
        let short = rows.min(columns);
        let count = rows * columns;
        let matrix = by_rows(x.buffer, x.start, rows, columns);
        let wide = if rows > columns { matrix.t() } else { matrix };
        let [left, right] = [wide, wide.t()];
        let of_gram = Product { target: gram, start: 0, left, right, take: 1.0, keep: 0.0 };
        cublas.multiply(stream, of_gram)?;
        let square = 0..short * short;
        polynomial.copy(stream, square.clone(), gram, square)?;
        let gram = by_rows(gram, 0, short, short);
        let target = &mut **polynomial;
        let squared = Product { target, start: 0, left: gram, right: gram, take: c, keep: b };
        cublas.multiply(stream, squared)?;
        let to = next.start..next.start + count;
        next.buffer.copy(stream, to, x.buffer, x.start..x.start + count)?;
        let b = by_rows(polynomial, 0, short, short);
        // A matrix with more rows than columns is the transpose of X.
        let [left, right] = if rows > columns { [matrix, b.t()] } else { [b, matrix] };
        let start = next.start;
        let of_next = Product { target: next.buffer, start, left, right, take: 1.0, keep: a };
        cublas.multiply(stream, of_next)?;
        mem::swap(x, next);
        Ok(())
    }
}

fn by_rows(buffer: &DeviceBuffer, start: usize, rows: usize, columns: usize) -> DeviceMatrix<'_> {
    DeviceMatrix { buffer, start, rows, columns, stored: Stored::ByRows }
}
