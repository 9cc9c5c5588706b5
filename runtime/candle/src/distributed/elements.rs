//! Elements of tensors as buffers of collectives, and back.

use candle_core::{Device, Result, Shape, Tensor, WithDType};
use half::{bf16, f16};
use hsdp::collective::Differentiable;

/// What candle and collectives both have, with a gradient.
pub(super) trait Real: Differentiable + WithDType {}

impl Real for f64 {}
impl Real for f32 {}
impl Real for f16 {}
impl Real for bf16 {}

/// The elements of a tensor in row-major order, however they lie.
pub(super) fn elements_of<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    tensor.detach().flatten_all()?.to_vec1()
}

/// The tensor of these elements; no op has made it.
pub(super) fn tensor_of<T: WithDType>(elements: Vec<T>, shape: Shape) -> Result<Tensor> {
    Tensor::from_vec(elements, shape, &Device::Cpu)
}
