//! Layers on the CPU as custom ops of candle, for any number of inputs.

use std::array;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};

use super::element::{LayerElement, LayerInput, LentTensor};

/// Gradients of the inputs that candle tracks.
pub(super) type LayerGradients<const N: usize> = [Option<Tensor>; N];

/// A function of `N` contiguous tensors on the CPU, with its gradients.
pub(super) trait CpuLayer<const N: usize> {
    /// Returns the name of the layer, for errors.
    fn name(&self) -> &'static str;

    /// Computes the output.
    fn forward(&self, inputs: [LayerInput<'_>; N]) -> Result<(CpuStorage, Shape)>;

    /// Computes the gradients of the inputs from `g`, the gradient of the output. The gradient of an
    /// input that candle does not track is `None`.
    fn backward(&self, inputs: [LayerInput<'_>; N], g: LayerInput<'_>)
    -> Result<LayerGradients<N>>;
}

/// Returns the output of a forward.
pub(super) fn output<T: LayerElement>(
    values: Vec<T>,
    shape: impl Into<Shape>,
) -> Result<(CpuStorage, Shape)> {
    Ok((T::to_cpu_storage_owned(values), shape.into()))
}

/// A layer as an op of candle.
pub(super) struct LayerOp<L>(pub(super) L);

/// Runs the backward of a layer, with the storages of its inputs locked for reading.
fn gradients<const N: usize>(
    layer: &impl CpuLayer<N>,
    tensors: [&Tensor; N],
    g: &Tensor,
) -> Result<LayerGradients<N>> {
    let g = g.detach().contiguous()?;
    let lent_g = LentTensor::of(&g);
    let lent = tensors.map(LentTensor::of);
    let inputs = lent.iter().map(LentTensor::input).collect::<Result<Vec<_>>>()?;
    layer.backward(array::from_fn(|index| inputs[index]), lent_g.input()?)
}

impl<L: CpuLayer<1>> CustomOp1 for LayerOp<L> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.forward([LayerInput::new(x, layout)])
    }

    fn bwd(&self, x: &Tensor, _output: &Tensor, g: &Tensor) -> Result<Option<Tensor>> {
        let [of_x] = gradients(&self.0, [x], g)?;
        Ok(of_x)
    }
}

impl<L: CpuLayer<2>> CustomOp2 for LayerOp<L> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.forward([LayerInput::new(a, a_layout), LayerInput::new(b, b_layout)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        _output: &Tensor,
        g: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [of_a, of_b] = gradients(&self.0, [a, b], g)?;
        Ok((of_a, of_b))
    }
}

impl<L: CpuLayer<3>> CustomOp3 for LayerOp<L> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
        c: &CpuStorage,
        c_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let inputs = [(a, a_layout), (b, b_layout), (c, c_layout)];
        self.0.forward(inputs.map(|(storage, layout)| LayerInput::new(storage, layout)))
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        _output: &Tensor,
        g: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [of_a, of_b, of_c] = gradients(&self.0, [a, b, c], g)?;
        Ok((of_a, of_b, of_c))
    }
}
