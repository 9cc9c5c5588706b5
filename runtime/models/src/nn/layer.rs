//! Layers on the CPU, for any number of inputs.

use std::array;

use candle_core::{CpuStorage, Result, Shape, Tensor};
use hsdp_candle::Gradient;
use hsdp_candle::layer::{Layer, LayerArgument, record};

use super::element::{LayerElement, LayerInput, LentTensor};

/// Gradients of the tracked inputs.
pub(super) type LayerGradients<const N: usize> = [Option<Gradient>; N];

/// A function of `N` contiguous tensors on the CPU, with its gradients.
pub(super) trait CpuLayer<const N: usize>: Send + Sync + 'static {
    /// Returns the name of the layer, for errors.
    fn name(&self) -> &'static str;

    /// Computes the output.
    fn forward(&self, inputs: [LayerInput<'_>; N]) -> Result<(CpuStorage, Shape)>;

    /// Computes the gradients of the inputs from `g`, the gradient of the output. The gradient of
    /// an input that is not tracked is `None`.
    fn backward(&self, inputs: [LayerInput<'_>; N], g: &Gradient) -> Result<LayerGradients<N>>;
}

/// Returns the output of a forward.
pub(super) fn output<T: LayerElement>(
    values: Vec<T>,
    shape: impl Into<Shape>,
) -> Result<(CpuStorage, Shape)> {
    Ok((T::to_cpu_storage_owned(values), shape.into()))
}

/// Computes the output of a layer, and records the layer in candle's graph.
pub(super) fn apply<const N: usize>(
    layer: impl CpuLayer<N>,
    inputs: [&Tensor; N],
) -> Result<Tensor> {
    let contiguous = inputs.iter().map(|input| input.contiguous()).collect::<Result<Vec<_>>>()?;
    // An input that is given twice is one tensor, whose gradients are summed in f32.
    let first = |index: usize| inputs.iter().position(|it| it.id() == inputs[index].id());
    let inputs: [&Tensor; N] = array::from_fn(|index| &contiguous[first(index).unwrap_or(index)]);
    let tracked = inputs.map(Tensor::track_op);
    let (elements, shape) = with_lent(inputs, tracked, |inputs| layer.forward(inputs))?;
    record(RecordedLayer(layer), &inputs, elements, shape)
}

/// Calls `run` with the storages of the inputs locked for reading.
fn with_lent<R, const N: usize>(
    tensors: [&Tensor; N],
    tracked: [bool; N],
    run: impl FnOnce([LayerInput<'_>; N]) -> Result<R>,
) -> Result<R> {
    let lent: [_; N] = array::from_fn(|index| LentTensor::new(tensors[index], tracked[index]));
    let inputs = lent.iter().map(LentTensor::input).collect::<Result<Vec<_>>>()?;
    run(array::from_fn(|index| inputs[index]))
}

struct RecordedLayer<L, const N: usize>(L);

impl<L: CpuLayer<N>, const N: usize> Layer for RecordedLayer<L, N> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn backward(&self, inputs: &[LayerArgument], g: &Gradient) -> Result<Vec<Option<Gradient>>> {
        let tensors: [_; N] = array::from_fn(|index| &inputs[index].tensor);
        let tracked = array::from_fn(|index| inputs[index].is_tracked);
        let gradients = with_lent(tensors, tracked, |inputs| self.0.backward(inputs, g))?;
        Ok(gradients.into())
    }
}
