//! Moves parameters into and out of candle's storages without a copy.

use std::mem;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor};
use hsdp_kernels::HostBuffer;
use parking_lot::Mutex;

/// Turns `buffer` into a storage.
pub(crate) fn storage_of(buffer: HostBuffer) -> CpuStorage {
    match buffer {
        HostBuffer::F32(values) => CpuStorage::F32(values),
        HostBuffer::F16(values) => CpuStorage::F16(values),
        HostBuffer::BF16(values) => CpuStorage::BF16(values),
    }
}

/// Turns `buffer` into a tensor, a leaf of candle's graph.
pub(crate) fn tensor_of(buffer: HostBuffer, shape: Shape) -> Result<Tensor> {
    match buffer {
        HostBuffer::F32(values) => Tensor::from_vec(values, shape, &Device::Cpu),
        HostBuffer::F16(values) => Tensor::from_vec(values, shape, &Device::Cpu),
        HostBuffer::BF16(values) => Tensor::from_vec(values, shape, &Device::Cpu),
    }
}

/// Moves `buffer` into the storage of `tensor`, for all views of it.
pub(crate) fn fill(tensor: &Tensor, buffer: HostBuffer) -> Result<()> {
    exchange(tensor, storage_of(buffer)).map(drop)
}

/// Frees the storage of `tensor`, for all views of it. Returns its buffer, unless it was vacant.
///
/// The remaining storage has the dtype [`VACANT`](crate::error::VACANT), which every candle op
/// refuses. It is not an empty f32 storage, because candle's matmul would read beyond its end.
pub(crate) fn vacate(tensor: &Tensor) -> Result<Option<HostBuffer>> {
    Ok(match exchange(tensor, vacant())? {
        CpuStorage::F32(values) => Some(values.into()),
        CpuStorage::F16(values) => Some(values.into()),
        CpuStorage::BF16(values) => Some(values.into()),
        _ => None,
    })
}

/// Moves the storage of `tensor`, which has no elements outside the tensor, into a new variable.
/// `tensor` is vacant until [`move_back`].
pub(crate) fn move_to_variable(tensor: &Tensor) -> Result<Tensor> {
    let storage = Storage::Cpu(exchange(tensor, vacant())?);
    Ok(Tensor::from_storage(storage, tensor.shape(), BackpropOp::none(), true))
}

/// Moves the storage of `variable` back into `tensor`.
pub(crate) fn move_back(variable: &Tensor, tensor: &Tensor) -> Result<()> {
    exchange(tensor, exchange(variable, vacant())?).map(drop)
}

fn vacant() -> CpuStorage {
    CpuStorage::F4(Vec::new())
}

/// Replaces the storage of `tensor`, and returns the old one.
fn exchange(tensor: &Tensor, storage: CpuStorage) -> Result<CpuStorage> {
    let exchange = Exchange(Mutex::new(storage));
    tensor.inplace_op1(&exchange)?;
    Ok(exchange.0.into_inner())
}

/// Op that exchanges a whole storage. candle lends it under its lock, so no other code may be
/// reading the tensor.
struct Exchange(Mutex<CpuStorage>);

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "exchange storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _layout: &Layout) -> Result<()> {
        mem::swap(storage, &mut self.0.lock());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::Error;

    fn parameter() -> Tensor {
        tensor_of(HostBuffer::F32(vec![1.0, 2.0, 3.0, 4.0]), Shape::from((2, 2))).expect("it fits")
    }

    #[test]
    fn a_storage_comes_and_goes_under_its_views() {
        let tensor = parameter();
        let view = tensor.t().expect("two dims");
        vacate(&tensor).expect("no code reads it");
        assert!(view.contiguous().is_err());
        fill(&tensor, HostBuffer::F32(vec![5.0, 6.0, 7.0, 8.0])).expect("no code reads it");
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
        let (freed, whole) = (parameter(), parameter());
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
