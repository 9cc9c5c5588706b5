//! Gathered parameters on their way into candle's storages: moved on the host, copied on a device.

use std::mem;

#[cfg(feature = "candle-cuda")]
use candle_core::CudaStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor, bail};
use hsdp::{Full, HostBuffer};
use parking_lot::Mutex;

#[cfg(feature = "candle-cuda")]
use crate::cuda;

/// A gathered parameter, in the form that candle's device needs.
#[derive(Debug)]
pub(crate) enum Gathered {
    /// A buffer that becomes a tensor's storage without a copy.
    Host(HostBuffer),
    /// A parameter that is copied once, on the device, because a candle storage owns its memory.
    #[cfg(feature = "candle-cuda")]
    Device(cuda::DeviceParameter),
}

impl Gathered {
    /// Takes the parameter out of `full`, for tensors on `device`. `None` if it has already been
    /// taken.
    pub(crate) fn take(full: &mut Full, index: usize, device: &Device) -> Option<Self> {
        #[cfg(feature = "candle-cuda")]
        if let (Device::Cuda(device), Some(part)) = (device, full.on_device(index)) {
            return Some(Self::Device(cuda::DeviceParameter { part, device: device.clone() }));
        }
        let _ = device;
        full.take(index).map(Self::Host)
    }

    /// Turns the parameter into a storage: a buffer without a copy, a part of a device by a copy.
    pub(crate) fn into_storage(self) -> Result<Storage> {
        Ok(match self {
            Self::Host(HostBuffer::F32(values)) => Storage::Cpu(CpuStorage::F32(values)),
            Self::Host(HostBuffer::F16(values)) => Storage::Cpu(CpuStorage::F16(values)),
            Self::Host(HostBuffer::BF16(values)) => Storage::Cpu(CpuStorage::BF16(values)),
            #[cfg(feature = "candle-cuda")]
            Self::Device(parameter) => Storage::Cuda(parameter.storage()?),
        })
    }

    /// Makes a tensor, a leaf of candle's graph.
    pub(crate) fn into_tensor(self, shape: Shape) -> Result<Tensor> {
        Ok(Tensor::from_storage(self.into_storage()?, shape, BackpropOp::none(), false))
    }

    /// Moves the parameter into the storage of `tensor`, for all views of it.
    pub(crate) fn fill(self, tensor: &Tensor) -> Result<()> {
        exchange(tensor, self.into_storage()?).map(drop)
    }
}

/// Frees the storage of `tensor`, for all views of it. Returns its buffer, if that was on the host
/// and not vacant.
///
/// The remaining storage has the dtype [`VACANT`](crate::error::VACANT), which every candle op
/// refuses. It is not an empty f32 storage, because candle's matmul would read beyond its end.
pub(crate) fn vacate(tensor: &Tensor) -> Result<Option<HostBuffer>> {
    Ok(match exchange(tensor, vacant(tensor.device())?)? {
        Storage::Cpu(CpuStorage::F32(values)) => Some(values.into()),
        Storage::Cpu(CpuStorage::F16(values)) => Some(values.into()),
        Storage::Cpu(CpuStorage::BF16(values)) => Some(values.into()),
        _ => None,
    })
}

/// Takes the storage of `tensor`, which is vacant afterwards.
pub(crate) fn take_storage(tensor: &Tensor) -> Result<Storage> {
    exchange(tensor, vacant(tensor.device())?)
}

/// Moves the storage of `tensor`, which has no elements outside the tensor, into a new variable.
/// `tensor` is vacant until [`move_back`].
pub(crate) fn move_to_variable(tensor: &Tensor) -> Result<Tensor> {
    Ok(Tensor::from_storage(take_storage(tensor)?, tensor.shape(), BackpropOp::none(), true))
}

/// Moves the storage of `variable` back into `tensor`.
pub(crate) fn move_back(variable: &Tensor, tensor: &Tensor) -> Result<()> {
    exchange(tensor, exchange(variable, vacant(tensor.device())?)?).map(drop)
}

fn vacant(device: &Device) -> Result<Storage> {
    #[cfg(feature = "candle-cuda")]
    if let Device::Cuda(device) = device {
        return cuda::vacant(device).map(Storage::Cuda);
    }
    let _ = device;
    Ok(Storage::Cpu(CpuStorage::F4(Vec::new())))
}

/// Replaces the storage of `tensor`, and returns the old one.
fn exchange(tensor: &Tensor, storage: Storage) -> Result<Storage> {
    let exchange = StorageExchange(Mutex::new(storage));
    tensor.inplace_op1(&exchange)?;
    Ok(exchange.0.into_inner())
}

/// Copies a storage, as the result of an identity op: candle gives each op's result a storage of
/// its own.
pub(crate) fn copy(storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("the input and the output of a unit must be contiguous, this one has {layout:?}")
    };
    let copied = match storage {
        CpuStorage::F32(values) => CpuStorage::F32(values[start..end].to_vec()),
        CpuStorage::F64(values) => CpuStorage::F64(values[start..end].to_vec()),
        CpuStorage::F16(values) => CpuStorage::F16(values[start..end].to_vec()),
        CpuStorage::BF16(values) => CpuStorage::BF16(values[start..end].to_vec()),
        _ => bail!("the input and the output of a unit must be f64, f32, bf16 or f16"),
    };
    Ok((copied, layout.shape().clone()))
}

/// Op that exchanges a whole storage. candle lends it under its lock, so no other code may be
/// reading the tensor.
struct StorageExchange(Mutex<Storage>);

impl InplaceOp1 for StorageExchange {
    fn name(&self) -> &'static str {
        "exchange storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let Storage::Cpu(other) = &mut *self.0.lock() else {
            bail!("exchange storage: the new storage is on a GPU, the tensor is on the CPU")
        };
        mem::swap(storage, other);
        Ok(())
    }

    #[cfg(feature = "candle-cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let Storage::Cuda(other) = &mut *self.0.lock() else {
            bail!("exchange storage: the new storage is on the CPU, the tensor is on a GPU")
        };
        mem::swap(storage, other);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::Error;

    fn parameter() -> Tensor {
        let values = Gathered::Host(HostBuffer::F32(vec![1.0, 2.0, 3.0, 4.0]));
        values.into_tensor(Shape::from((2, 2))).expect("on the host")
    }

    #[test]
    fn a_storage_comes_and_goes_under_its_views() {
        let tensor = parameter();
        let view = tensor.t().expect("two dims");
        vacate(&tensor).expect("no code reads it");
        assert!(view.contiguous().is_err());
        let values = Gathered::Host(HostBuffer::F32(vec![5.0, 6.0, 7.0, 8.0]));
        values.fill(&tensor).expect("no code reads it");
        assert_eq!(view.to_vec2::<f32>().expect("f32"), [[5.0, 7.0], [6.0, 8.0]]);
    }

    #[test]
    fn a_storage_moves_to_a_variable_and_back_without_a_copy() {
        let address = |tensor: &Tensor| match &*tensor.storage_and_layout().0 {
            Storage::Cpu(CpuStorage::F32(values)) => values.as_ptr(),
            _ => panic!("another storage"),
        };
        let tensor = parameter();
        let before = address(&tensor);
        let variable = move_to_variable(&tensor).expect("no code reads it");
        assert!(variable.is_variable());
        assert_eq!((variable.dims(), address(&variable)), (&[2, 2][..], before));
        assert!(tensor.exp().is_err());
        move_back(&variable, &tensor).expect("no code reads it");
        assert_eq!(address(&tensor), before);
        assert!(variable.exp().is_err());
    }

    #[test]
    fn every_kind_of_op_refuses_a_freed_parameter() {
        let freed = parameter();
        let whole = parameter();
        vacate(&freed).expect("no code reads it");
        let rows = Tensor::new(&[0_u32], &Device::Cpu).expect("one index");
        let attempts = [
            ("matmul, right", whole.matmul(&freed)),
            ("matmul, left", freed.matmul(&whole)),
            ("matmul, both", freed.matmul(&freed)),
            ("matmul, transposed", whole.matmul(&freed.t().expect("two dims"))),
            ("binary", &whole + &freed),
            ("unary", freed.exp()),
            ("affine", &freed * 2.0),
            ("reduction", freed.sum_all()),
            ("cast", freed.to_dtype(DType::BF16)),
            ("rows", freed.index_select(&rows, 0)),
            ("copy of a view", freed.t().and_then(|view| view.contiguous())),
            ("concatenation", Tensor::cat(&[&whole, &freed], 1)),
        ];
        for (what, attempt) in attempts {
            let error = Error::from(attempt.err().unwrap_or_else(|| panic!("{what} was accepted")));
            assert!(matches!(error, Error::Resharded { .. }), "{what}: {error}");
        }
        let error = Error::from(freed.to_vec2::<f32>().expect_err("there is nothing to read"));
        assert!(matches!(error, Error::Resharded { .. }), "{error}");
    }
}
