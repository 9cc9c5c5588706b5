//! Buffers of a device for matrices: the parts that a rank sends, and the products of an owner.

use hsdp_kernels::cuda::{
    Cublas, CudaError, Device, DeviceBuffer, DeviceMatrixMut, NewtonSchulzBuffers,
};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{MatrixDType, NewtonSchulz, Values};
use hsdp_sharding::{DType, WholeMatrix};

use crate::optimizer::exchange::MatrixExchange;
use crate::state::model_device::ModelDevice;

/// The buffers of a device that updates need: the parts that a rank sends, and the products of an
/// owner.
#[derive(Debug)]
pub(super) struct OwnerWorkspace {
    /// Directions of this rank's parts, in the order in which they are sent.
    pub(super) directions: DeviceBuffer,
    pub(super) products: Products,
}

/// The orthogonalization of the matrices that this rank owns.
#[derive(Debug)]
pub(super) struct Products {
    cublas: Cublas,
    buffers: Vec<(MatrixDType, NewtonSchulzBuffers)>,
    /// One matrix, with room for the largest.
    matrix: DeviceBuffer,
}

impl OwnerWorkspace {
    /// Makes the buffers of an exchange, whose matrices are computed in these dtypes.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] without cuBLAS; [`CudaError::OutOfMemory`];
    /// [`CudaError::Driver`].
    pub(super) fn new(
        device: &ModelDevice,
        exchange: &MatrixExchange,
        dtype: impl Fn(&WholeMatrix) -> MatrixDType,
    ) -> Result<Self, CudaError> {
        let device = device.stream.device();
        let directions = of_update(device, exchange.sent_len(), "directions of muon")?;
        Ok(Self { directions, products: Products::new(device, exchange, dtype)? })
    }
}

fn of_update(device: &Device, len: usize, what: &str) -> Result<DeviceBuffer, CudaError> {
    let _update = memory::scope(Category::Update);
    DeviceBuffer::new(device, DType::F32, len, what)
}

impl Products {
    fn new(
        device: &Device,
        exchange: &MatrixExchange,
        dtype_of: impl Fn(&WholeMatrix) -> MatrixDType,
    ) -> Result<Self, CudaError> {
        let mut buffers = Vec::new();
        for dtype in [MatrixDType::F32, MatrixDType::BF16] {
            let owned = exchange.owned().filter(|it| dtype_of(it) == dtype);
            let sizes: Vec<_> = owned.map(|it| (it.rows, it.columns)).collect();
            if !sizes.is_empty() {
                let of_dtype = {
                    let _update = memory::scope(Category::Update);
                    NewtonSchulzBuffers::new(device, dtype, sizes)?
                };
                buffers.push((dtype, of_dtype));
            }
        }
        let largest = exchange.owned().map(WholeMatrix::numel).max().unwrap_or(0);
        let matrix = of_update(device, largest, "a matrix of muon")?;
        Ok(Self { cublas: Cublas::new(device)?, buffers, matrix })
    }

    /// Orthogonalizes a matrix, and waits for it.
    pub(super) fn orthogonalize(
        &mut self,
        device: &ModelDevice,
        by: &NewtonSchulz,
        values: &mut [f32],
        matrix: &WholeMatrix,
    ) -> Result<(), CudaError> {
        let Self { cublas, buffers, matrix: on_device } = self;
        let stream = &*device.stream;
        let mut buffers = buffers.iter_mut().filter(|(dtype, _)| *dtype == by.dtype);
        let (_, buffers) = buffers.next().expect("there are buffers for all owned matrices");
        on_device.write_part(stream, 0, Values::F32(values))?;
        let &WholeMatrix { rows, columns, .. } = matrix;
        let target = DeviceMatrixMut { buffer: &mut *on_device, start: 0, rows, columns };
        stream.orthogonalize(by, target, buffers, cublas)?;
        on_device.read_back_into(stream, 0, values, device.patience)
    }
}
