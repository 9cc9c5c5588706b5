//! A gathered parameter on its way into a tensor, from the host or from a device.

use candle_core::{Device, Result, Shape, Tensor};
use hsdp::{Full, HostBuffer};

#[cfg(feature = "candle-cuda")]
use crate::cuda;
use crate::storage;

/// A gathered parameter, in the form that candle's device needs.
#[derive(Debug)]
pub(crate) enum Gathered {
    /// A buffer that becomes a tensor's storage without a copy.
    Host(HostBuffer),
    /// A parameter that is copied once, on the device, because a candle storage owns its memory.
    #[cfg(feature = "candle-cuda")]
    Device(cuda::Parameter),
}

impl Gathered {
    /// Takes the parameter out of `full`, for tensors on `device`. `None` if it has already been
    /// taken.
    pub(crate) fn take(full: &mut Full, index: usize, device: &Device) -> Option<Self> {
        #[cfg(feature = "candle-cuda")]
        if let (Device::Cuda(device), Some(part)) = (device, full.on_device(index)) {
            return Some(Self::Device(cuda::Parameter { part, device: device.clone() }));
        }
        let _ = device;
        full.take(index).map(Self::Host)
    }

    /// Makes a tensor, a leaf of candle's graph.
    pub(crate) fn into_tensor(self, shape: Shape) -> Result<Tensor> {
        match self {
            Self::Host(buffer) => storage::tensor_of(buffer, shape),
            #[cfg(feature = "candle-cuda")]
            Self::Device(parameter) => cuda::tensor_of(&parameter, shape),
        }
    }

    /// Moves the parameter into the storage of `tensor`, for all views of it.
    pub(crate) fn fill(self, tensor: &Tensor) -> Result<()> {
        match self {
            Self::Host(buffer) => storage::fill(tensor, buffer),
            #[cfg(feature = "candle-cuda")]
            Self::Device(parameter) => cuda::fill(tensor, &parameter),
        }
    }
}

/// Frees the storage of `tensor`, for all views of it. Returns its buffer, if that was on the host
/// and not vacant.
pub(crate) fn vacate(tensor: &Tensor) -> Result<Option<HostBuffer>> {
    #[cfg(feature = "candle-cuda")]
    if tensor.device().is_cuda() {
        return cuda::vacate(tensor).map(|()| None);
    }
    storage::vacate(tensor)
}

/// Moves the storage of `tensor`, a whole parameter, into a new variable. `tensor` is vacant until
/// [`move_back`].
pub(crate) fn move_to_variable(tensor: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "candle-cuda")]
    if tensor.device().is_cuda() {
        return cuda::move_to_variable(tensor);
    }
    storage::move_to_variable(tensor)
}

/// Moves the storage of `variable` back into `tensor`.
pub(crate) fn move_back(variable: &Tensor, tensor: &Tensor) -> Result<()> {
    #[cfg(feature = "candle-cuda")]
    if tensor.device().is_cuda() {
        return cuda::move_back(variable, tensor);
    }
    storage::move_back(variable, tensor)
}
