//! Conversion between tensors and the buffers of collectives.

use candle_core::{Device, Result, Shape, Tensor, WithDType};
use half::{bf16, f16};
use hsdp::collective::Differentiable;

/// An element type with a gradient that candle and the collectives both support.
pub(super) trait Real: Differentiable + WithDType {}

impl Real for f64 {}
impl Real for f32 {}
impl Real for f16 {}
impl Real for bf16 {}

/// Returns the elements of a tensor in row-major order, for any layout.
pub(super) fn elements_of<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    tensor.detach().flatten_all()?.to_vec1()
}

/// Makes a tensor of these elements, a leaf of candle's graph.
pub(super) fn tensor_of<T: WithDType>(elements: Vec<T>, shape: Shape) -> Result<Tensor> {
    Tensor::from_vec(elements, shape, &Device::Cpu)
}
