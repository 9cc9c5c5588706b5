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

/// Implements candle's trait of ops with as many inputs as there are gradients.
macro_rules! custom_op {
    (
        $op:ident, $count:literal, $gradients:ty,
        $($input:ident: $layout:ident => $gradient:ident),+
    ) => {
        impl<L: CpuLayer<$count>> $op for LayerOp<L> {
            fn name(&self) -> &'static str {
                self.0.name()
            }

            fn cpu_fwd(
                &self,
                $($input: &CpuStorage, $layout: &Layout,)+
            ) -> Result<(CpuStorage, Shape)> {
                self.0.forward([$(LayerInput::new($input, $layout)),+])
            }

            fn bwd(
                &self,
                $($input: &Tensor,)+
                _output: &Tensor,
                g: &Tensor,
            ) -> Result<$gradients> {
                let [$($gradient),+] = gradients(&self.0, [$($input),+], g)?;
                Ok(($($gradient),+))
            }
        }
    };
}

type InputGradient = Option<Tensor>;

custom_op!(CustomOp1, 1, InputGradient, x: layout => of_x);
custom_op!(CustomOp2, 2, (InputGradient, InputGradient), a: a_layout => of_a, b: b_layout => of_b);
custom_op!(
    CustomOp3, 3, (InputGradient, InputGradient, InputGradient),
    a: a_layout => of_a, b: b_layout => of_b, c: c_layout => of_c
);
