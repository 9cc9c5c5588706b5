//! candle tensors on a GPU: parameters are copied into them on the device, gradients are lent
//! without a copy.
//!
//! candle issues every operation on a tensor on the stream of its device, and records it nowhere
//! else. So a parameter is copied from its gathered unit on that stream, after the gather. A
//! gradient is lent as foreign memory, which candle's stream may use again once the gradient is
//! packed (`DeviceBuffer::foreign`).

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, result,
};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};
use hsdp::GradientValues;
use hsdp_kernels::cuda::{CudaError, Device, DeviceBuffer, DevicePart, DeviceSlice, Stream};

/// A gathered parameter, and the candle device of the tensors that will hold it.
#[derive(Debug)]
pub(crate) struct DeviceParameter {
    pub(crate) part: DevicePart,
    pub(crate) device: CudaDevice,
}

impl DeviceParameter {
    /// Returns a new storage with the parameter's elements.
    pub(crate) fn storage(&self) -> Result<CudaStorage> {
        let slice = self.part.on_device().expect("a `DeviceParameter` is on a device");
        match slice.dtype() {
            hsdp::DType::F32 => copied::<f32>(&slice, &self.device),
            hsdp::DType::F16 => copied::<f16>(&slice, &self.device),
            hsdp::DType::BF16 => copied::<bf16>(&slice, &self.device),
            other => bail!("a parameter on a GPU must be f32, f16 or bf16, this one is {other}"),
        }
    }
}

/// Copies elements into a storage that candle owns, on candle's stream.
fn copied<T: CudaDType + DeviceRepr>(
    from: &DeviceSlice<'_>,
    device: &CudaDevice,
) -> Result<CudaStorage> {
    let stream = device.cuda_stream();
    // SAFETY: CU-7, all elements are written below, before another operation is issued on the
    // stream.
    let mut copy: CudaSlice<T> = unsafe { device.alloc(from.len()) }?;
    let ours = library(device)?;
    let address = from.buffer().address(from.range().start);
    let bytes = size_of::<T>() * from.len();
    {
        let (to, _written) = copy.device_ptr_mut(&stream);
        let issued: std::result::Result<(), CudaError> =
            ours.enqueue(&[from.buffer()], &mut [], |raw| {
                // SAFETY: CU-7, both have `bytes` bytes, and the copy is on the stream on which
                // `copy` was made.
                unsafe { result::memcpy_dtod_async(to, address, bytes, raw) }
                    .map_err(|error| of_candle(&error))
            });
        issued.map_err(candle_core::Error::wrap)?;
    }
    Ok(CudaStorage::wrap_cuda_slice(copy, device.clone()))
}

fn of_candle(error: &result::DriverError) -> CudaError {
    CudaError::Mismatch { operation: "copy to a tensor of candle", problem: format!("{error:?}") }
}

/// Returns the stream of a candle device, as a foreign stream.
fn library(device: &CudaDevice) -> Result<Arc<Stream>> {
    let stream = device.cuda_stream();
    let ordinal = stream.context().ordinal();
    let ours = Device::new(ordinal).map_err(candle_core::Error::wrap)?;
    // SAFETY: CU-7, candle retains the primary context, and its stream lives as long as the tensors
    // that are made or read here.
    Ok(Arc::new(unsafe { Stream::foreign(&ours, stream.cu_stream()) }))
}

/// Returns the storage of a freed parameter, with a dtype that every candle op refuses.
pub(crate) fn vacant(device: &CudaDevice) -> Result<CudaStorage> {
    let slice = CudaStorageSlice::F4(device.alloc_zeros::<u8>(1)?);
    Ok(CudaStorage { slice, device: device.clone() })
}

/// Copies a tensor's elements, as the result of an identity op.
pub(crate) fn copy(storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("the input and the output of a unit must be contiguous, this one has {layout:?}")
    };
    if (start, end) != (0, length(storage)?) {
        bail!(
            "the input and the output of a unit on a GPU must be whole storages, this one is a \
             part: {start}..{end}"
        )
    }
    Ok((storage.try_clone(layout)?, layout.shape().clone()))
}

fn length(storage: &CudaStorage) -> Result<usize> {
    Ok(match storage.dtype() {
        DType::F32 => storage.as_cuda_slice::<f32>()?.len(),
        DType::F64 => storage.as_cuda_slice::<f64>()?.len(),
        DType::F16 => storage.as_cuda_slice::<f16>()?.len(),
        DType::BF16 => storage.as_cuda_slice::<bf16>()?.len(),
        _ => bail!("the input and the output of a unit must be f64, f32, bf16 or f16"),
    })
}

/// Lends a contiguous gradient without a copy. It is kept until the device has packed it.
pub(crate) fn lent(tensor: Tensor) -> Result<Arc<dyn GradientValues>> {
    let (dtype, address, device) = {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("the gradient is not on a GPU") };
        let start = layout.start_offset();
        let (dtype, address) = match storage.dtype() {
            DType::F32 => (hsdp::DType::F32, address_of::<f32>(storage, start)?),
            DType::F16 => (hsdp::DType::F16, address_of::<f16>(storage, start)?),
            DType::BF16 => (hsdp::DType::BF16, address_of::<bf16>(storage, start)?),
            other => {
                bail!("a gradient on a GPU must be f32, f16 or bf16, this one is {other:?}")
            }
        };
        (dtype, address, storage.device.clone())
    };
    let stream = library(&device)?;
    let len = tensor.elem_count();
    // SAFETY: CU-7, the tensor has `len` elements from `address` on, keeps them, and is not
    // written: it is a gradient.
    let buffer = unsafe { DeviceBuffer::foreign(&stream, dtype, len, address, Box::new(tensor)) };
    Ok(Arc::new(buffer.map_err(candle_core::Error::wrap)?))
}

/// Returns the device address of an element.
fn address_of<T: CudaDType>(storage: &CudaStorage, element: usize) -> Result<u64> {
    let stream = storage.device.cuda_stream();
    let (start, _read) = storage.as_cuda_slice::<T>()?.device_ptr(&stream);
    Ok(start + (element * size_of::<T>()) as u64)
}
