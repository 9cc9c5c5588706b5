//! The orthogonalization of matrices by products of cuBLAS.

use std::mem;
use std::ops::Range;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::device::{CudaKernel, Device};
use super::error::CudaError;
use super::launch::Launch;
use super::product::{Cublas, DeviceMatrices, DeviceMatrix, Product, Stored};
use super::stream::Stream;
use super::wire::PARTIAL;
use crate::memory::{self, Category};
use crate::round::nearest_f32;
use crate::{MatrixDType, NewtonSchulz};

/// The name of the operation in errors.
const OPERATION: &str = "orthogonalize";

/// The buffers that [`Stream::orthogonalize`] needs besides the matrices. They are large enough for
/// bundles of several shapes, one after the other. Their elements have no meaning between calls.
#[derive(Debug)]
pub struct NewtonSchulzBuffers {
    dtype: MatrixDType,
    /// A of each matrix.
    gram: DeviceBuffer,
    /// B of each matrix.
    polynomial: DeviceBuffer,
    /// The next X of each matrix.
    next: DeviceBuffer,
    /// X in bf16 of each matrix. In f32, X is where the matrix is.
    rounded: Option<DeviceBuffer>,
    /// The squares of an X.
    squares: DeviceBuffer,
}

impl NewtonSchulzBuffers {
    /// Takes memory of a device for iterations in `dtype` on bundles, each a number of matrices,
    /// their rows and their columns: twice the elements of the squares of the lesser size, and as
    /// many elements as the matrices have, in bf16 twice as many, each as many as the bundle with
    /// the most needs. Their bytes count in the [scope](crate::memory::scope) of this thread; 8 KiB
    /// for the norm do not.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a bundle has more than `usize::MAX` elements;
    /// [`CudaError::OutOfMemory`] if the device has no memory left; [`CudaError::Driver`] if a call
    /// of the driver fails.
    pub fn new(
        device: &Device,
        dtype: MatrixDType,
        bundles: impl IntoIterator<Item = [usize; 3]>,
    ) -> Result<Self, CudaError> {
        let (whole, square) = largest(bundles)?;
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

/// Returns the most elements of a bundle, and the most of its squares of the lesser size.
fn largest(bundles: impl IntoIterator<Item = [usize; 3]>) -> Result<(usize, usize), CudaError> {
    bundles.into_iter().try_fold((0, 0), |(whole, square), [count, rows, columns]| {
        let one = rows.checked_mul(columns);
        let Some(all) = one.and_then(|one| one.checked_mul(count)) else {
            let problem = format!("matrices of {count} x {rows} x {columns} are too large");
            return Err(CudaError::Mismatch { operation: OPERATION, problem });
        };
        // No larger than the matrices.
        let short = rows.min(columns);
        Ok((whole.max(all), square.max(count * short * short)))
    })
}

impl Stream {
    /// Replaces each of some matrices of f32 by its orthogonalization, as
    /// [`NewtonSchulz::orthogonalize`] does on the host. `buffers` are made for their number and
    /// sizes, and for the dtype of the iterations.
    ///
    /// Issues products, copies and launches, and does not wait. Each product is one call for all
    /// matrices. Products are rounded where the host rounds them, and are summed in another order.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the matrices are not in their buffer, if a buffer is too small, has
    /// another dtype or is of another device; the errors of [`Cublas::multiply`];
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn orthogonalize(
        &self,
        by: &NewtonSchulz,
        matrices: DeviceMatrices<'_>,
        buffers: &mut NewtonSchulzBuffers,
        cublas: &mut Cublas,
    ) -> Result<(), CudaError> {
        let range = check(by, &matrices, buffers)?;
        if range.is_empty() {
            return Ok(());
        }
        let NewtonSchulzBuffers { gram, polynomial, next, rounded, squares, .. } = buffers;
        let DeviceMatrices { buffer: matrices, start, count, rows, columns } = matrices;
        let numel = rows * columns;
        for at in (0..range.len()).step_by(numel) {
            let own = start + at..start + at + numel;
            self.squares(by.dtype, matrices, own.clone(), squares)?;
            let rounded = rounded.as_mut().map(|rounded| (rounded, at));
            self.normalize(by, matrices, own, rounded, squares)?;
        }
        let of = |buffer, start| DeviceMatrices { buffer, start, count, rows, columns };
        let own = match rounded {
            Some(rounded) => of(rounded, 0),
            None => of(&mut *matrices, start),
        };
        let x = [own, of(next, 0)];
        let mut iteration = DeviceIteration { stream: self, x, gram, polynomial, cublas };
        let coefficients = by.coefficients.map(nearest_f32);
        (0..by.steps).try_for_each(|_| iteration.step(coefficients))?;
        let found = if by.steps.is_multiple_of(2) { rounded.as_ref() } else { Some(&*next) };
        match (found, by.dtype) {
            (None, _) => Ok(()),
            (Some(found), MatrixDType::F32) => {
                matrices.copy(self, range.clone(), found, 0..range.len())
            }
            (Some(found), MatrixDType::BF16) => self.widen(matrices, range, found),
        }
    }

    /// X = X / max(norm(X), eps), rounded, of the matrix in this range: there, or from an element of
    /// another buffer on.
    fn normalize(
        &self,
        by: &NewtonSchulz,
        matrices: &mut DeviceBuffer,
        range: Range<usize>,
        rounded: Option<(&mut DeviceBuffer, usize)>,
        squares: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let from = matrices.address(range.start);
        let len = range.len() as u64;
        let to = rounded.as_ref().map_or(from, |(rounded, at)| rounded.address(*at));
        let squared = squares.address(0);
        let launch = Launch::over(CudaKernel::Normalize(by.dtype), range.len())
            .argument(&to)
            .argument(&from)
            .argument(&len)
            .argument(&squared)
            .argument(&by.eps);
        match rounded {
            // SAFETY: CU-5, both have so many elements, and the squares are there.
            Some((rounded, _)) => unsafe {
                launch.issue(self, &[matrices, squares], &mut [rounded])
            },
            // SAFETY: CU-5, as above.
            None => unsafe { launch.issue(self, &[squares], &mut [matrices]) },
        }
    }
}

/// Checks that all matrices of an iteration lie in their buffers, and returns the elements that are
/// replaced.
fn check(
    by: &NewtonSchulz,
    matrices: &DeviceMatrices<'_>,
    buffers: &NewtonSchulzBuffers,
) -> Result<Range<usize>, CudaError> {
    let refuse = |problem| Err(CudaError::Mismatch { operation: OPERATION, problem });
    let &DeviceMatrices { ref buffer, start, count, rows, columns } = matrices;
    let len = buffer.len();
    buffer.check(OPERATION, DType::F32, len)?;
    let own = buffers.dtype;
    let dtype = by.dtype;
    let all = rows.checked_mul(columns).and_then(|one| one.checked_mul(count));
    let Some(all) = all.filter(|it| *it <= len && start <= len - it) else {
        return refuse(format!(
            "matrices of {count} x {rows} x {columns} from element {start} on do not lie in {len} elements"
        ));
    };
    if own != dtype {
        return refuse(format!("iterations in {dtype} with buffers of {own}"));
    }
    let (whole, square) = largest([[count, rows, columns]])?;
    let most = buffers.next.len();
    let widest = buffers.gram.len();
    if whole > most || square > widest {
        return refuse(format!(
            "matrices of {count} x {rows} x {columns}, with buffers for {most} elements and {widest} of squares"
        ));
    }
    Ok(start..start + all)
}

struct DeviceIteration<'a> {
    stream: &'a Stream,
    /// X of each matrix, and the next X. They change places in each step.
    x: [DeviceMatrices<'a>; 2],
    /// A of each matrix.
    gram: &'a mut DeviceBuffer,
    /// B of each matrix.
    polynomial: &'a mut DeviceBuffer,
    cublas: &'a mut Cublas,
}

impl DeviceIteration<'_> {
    /// A = X X^T; B = b A + c A A; X = a X + B X.
    fn step(&mut self, [a, b, c]: [f32; 3]) -> Result<(), CudaError> {
        let Self { stream, x: [x, next], gram, polynomial, cublas } = self;
        let &mut DeviceMatrices { count, rows, columns, .. } = x;
        let short = rows.min(columns);
        let all = count * rows * columns;
        let matrix = by_rows(x.buffer, x.start, rows, columns);
        let wide = if rows > columns { matrix.t() } else { matrix };
        let [left, right] = [wide, wide.t()];
        let of_gram = Product { count, target: gram, start: 0, left, right, take: 1.0, keep: 0.0 };
        cublas.multiply(stream, of_gram)?;
        let squares = 0..count * short * short;
        polynomial.copy(stream, squares.clone(), gram, squares)?;
        let gram = by_rows(gram, 0, short, short);
        let target = &mut **polynomial;
        let squared =
            Product { count, target, start: 0, left: gram, right: gram, take: c, keep: b };
        cublas.multiply(stream, squared)?;
        let to = next.start..next.start + all;
        next.buffer.copy(stream, to, x.buffer, x.start..x.start + all)?;
        let b = by_rows(polynomial, 0, short, short);
        // A matrix with more rows than columns is the transpose of X.
        let [left, right] = if rows > columns { [matrix, b.t()] } else { [b, matrix] };
        let start = next.start;
        let target = &mut *next.buffer;
        let of_next = Product { count, target, start, left, right, take: 1.0, keep: a };
        cublas.multiply(stream, of_next)?;
        mem::swap(x, next);
        Ok(())
    }
}

fn by_rows(buffer: &DeviceBuffer, start: usize, rows: usize, columns: usize) -> DeviceMatrix<'_> {
    DeviceMatrix { buffer, start, rows, columns, stored: Stored::ByRows }
}
