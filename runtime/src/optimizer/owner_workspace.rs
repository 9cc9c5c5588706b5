//! Buffers of a device for matrices: the parts that a rank sends, and the products of an owner.

use hsdp_kernels::cuda::{
    Cublas, CudaError, Device, DeviceBuffer, DeviceMatrices, NewtonSchulzBuffers,
};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{MatrixDType, NewtonSchulz, Values};
use hsdp_sharding::{DType, WholeMatrix};

use crate::optimizer::exchange::{Bundle, MatrixExchange};
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
    /// The matrices of a bundle, with room for the largest.
    matrices: DeviceBuffer,
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
        let mut largest = 0;
        for dtype in [MatrixDType::F32, MatrixDType::BF16] {
            // No bundle of an update is larger, whatever its iterations are.
            let bundles = exchange.together(|it| (dtype_of(it) == dtype).then_some(()));
            if bundles.is_empty() {
                continue;
            }
            let sizes = bundles.iter().map(|it| [it.count(), it.first.rows, it.first.columns]);
            let of_dtype = {
                let _update = memory::scope(Category::Update);
                NewtonSchulzBuffers::new(device, dtype, sizes.clone())?
            };
            buffers.push((dtype, of_dtype));
            largest = sizes.map(|sizes| sizes.iter().product()).fold(largest, usize::max);
        }
        let matrices = of_update(device, largest, "matrices of muon")?;
        Ok(Self { cublas: Cublas::new(device)?, buffers, matrices })
    }

    /// Orthogonalizes the matrices of a bundle, and waits for them.
    pub(super) fn orthogonalize(
        &mut self,
        device: &ModelDevice,
        by: &NewtonSchulz,
        values: &mut [f32],
        bundle: &Bundle<'_>,
    ) -> Result<(), CudaError> {
        let Self { cublas, buffers, matrices } = self;
        let stream = &*device.stream;
        let mut buffers = buffers.iter_mut().filter(|(dtype, _)| *dtype == by.dtype);
        let (_, buffers) = buffers.next().expect("there are buffers for all owned matrices");
        matrices.write_part(stream, 0, Values::F32(values))?;
        let &WholeMatrix { rows, columns, .. } = bundle.first;
        let count = bundle.count();
        let targets = DeviceMatrices { buffer: &mut *matrices, start: 0, count, rows, columns };
        stream.orthogonalize(by, targets, buffers, cublas)?;
        matrices.read_back_into(stream, 0, values, device.patience)
    }
}
