//! Elements of tensors as buffers of collectives, and back.

use candle_core::{Device, Result, Shape, Tensor, WithDType};
use half::{bf16, f16};
use hsdp::collective::Differentiable;

/// The element types with a gradient that candle and the collectives both have.
pub(super) trait Real: Differentiable + WithDType {}

impl Real for f64 {}
impl Real for f32 {}
impl Real for f16 {}
impl Real for bf16 {}

/// The elements of a tensor in row-major order, whatever its layout.
pub(super) fn elements_of<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    tensor.detach().flatten_all()?.to_vec1()
}

/// The tensor of these elements, a leaf of candle's graph.
pub(super) fn tensor_of<T: WithDType>(elements: Vec<T>, shape: Shape) -> Result<Tensor> {
    Tensor::from_vec(elements, shape, &Device::Cpu)
}
