//! Linear layers.

use candle_core::{CpuStorage, DType, Result, Shape, Tensor, bail};
use hsdp_candle::Gradient;
use hsdp_kernels::{Fold, HostBuffer, Matrix, Threads, Values, matmul, product};

use super::composed;
use super::element::{LayerInput, check_dtypes, last_dim};
use super::factors::Factors;
use super::layer::{CpuLayer, LayerGradients, apply};
use super::rows::{Rows, in_order, narrowed};

const NAME: &str = "linear";

/// Computes `x W^T + b` on the last dim of `x`, with a weight `[outputs, inputs]` and an optional
/// bias `[outputs]`.
///
/// On the CPU the backward computes only the gradients that candle tracks, so a frozen weight costs
/// no time there. If `x` and the weight are bf16, the backward rounds the gradient of the output to
/// bf16 before it multiplies: a processor with AVX512-BF16 is faster at products of two bf16. On a
/// GPU this is [`composed::linear`].
///
/// # Errors
/// If the shapes do not fit, or a dtype is not f32, bf16 or f16.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    check_shapes(x, weight, bias)?;
    if !x.device().is_cpu() {
        return composed::linear(x, weight, bias);
    }
    match bias {
        Some(bias) => apply(LinearOp, [x, weight, bias]),
        None => apply(LinearOp, [x, weight]),
    }
}

fn check_shapes(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    check_dtypes(NAME, &[x, weight])?;
    let inputs = last_dim(NAME, x)?;
    let outputs = match weight.dims() {
        [outputs, of_weight] if *of_weight == inputs => *outputs,
        dims => bail!(
            "{NAME}: the weight has the shape {dims:?}, and the last dim of x, {:?}, needs [outputs, {inputs}]",
            x.dims()
        ),
    };
    let Some(bias) = bias else { return Ok(()) };
    check_dtypes(NAME, &[bias])?;
    if bias.dims() != [outputs] {
        bail!("{NAME}: the bias has the shape {:?}, and the weight needs [{outputs}]", bias.dims())
    }
    Ok(())
}

struct LinearOp;

/// Returns the number of rows.
fn count(dims: &[usize]) -> usize {
    dims.iter().rev().skip(1).product()
}

/// Computes the outputs: the product, added to the biases if there are any.
fn forward(
    x: LayerInput<'_>,
    weight: LayerInput<'_>,
    bias: Option<&[f32]>,
) -> Result<(CpuStorage, Shape)> {
    let mut dims = x.dims().to_vec();
    let count = count(&dims);
    let inputs = dims.pop().unwrap_or_default();
    let outputs = weight.dims()[0];
    let factors = [
        Matrix::new(x.values(NAME)?, count, inputs),
        Matrix::new(weight.values(NAME)?, outputs, inputs).t(),
    ];
    let y = match bias {
        Some(bias) => {
            let mut y = bias.repeat(count);
            matmul(&mut y, Fold::Add, factors, Threads::Pool);
            y
        }
        None => product(factors, Threads::Pool),
    };
    dims.push(outputs);
    let y = match x.dtype() {
        DType::BF16 => CpuStorage::BF16(narrowed(&y)),
        DType::F16 => CpuStorage::F16(narrowed(&y)),
        _ => CpuStorage::F32(y),
    };
    Ok((y, dims.into()))
}

impl CpuLayer<2> for LinearOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&self, [x, weight]: [LayerInput<'_>; 2]) -> Result<(CpuStorage, Shape)> {
        forward(x, weight, None)
    }

    fn backward(
        &self,
        [x, weight]: [LayerInput<'_>; 2],
        g: &Gradient,
    ) -> Result<LayerGradients<2>> {
        let (outputs, inputs) = weight.dims2()?;
        let count = count(x.dims());
        let rounded = match x.is_tracked() || weight.is_tracked() {
            true => Factors::of(&[x.values(NAME)?, weight.values(NAME)?]).of_gradient(g.elements()),
            false => None,
        };
        let g = rounded.as_ref().map_or(Values::F32(g.elements()), HostBuffer::values);
        let g = Matrix::new(g, count, outputs);
        let of_x = x.gradient(|| {
            let weight = Matrix::new(weight.values(NAME)?, outputs, inputs);
            Ok(product([g, weight], Threads::Pool))
        })?;
        let of_weight = weight.gradient(|| {
            let x = Matrix::new(x.values(NAME)?, count, inputs);
            Ok(product([g.t(), x], Threads::Pool))
        })?;
        Ok([of_x, of_weight])
    }
}

impl CpuLayer<3> for LinearOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&self, [x, weight, bias]: [LayerInput<'_>; 3]) -> Result<(CpuStorage, Shape)> {
        forward(x, weight, Some(&bias.wide(NAME)?))
    }

    /// Computes the gradients of [`CpuLayer<2>`], and that of the bias, the sum over the rows.
    fn backward(
        &self,
        [x, weight, bias]: [LayerInput<'_>; 3],
        g: &Gradient,
    ) -> Result<LayerGradients<3>> {
        let [of_x, of_weight] = self.backward([x, weight], g)?;
        let outputs = bias.elem_count();
        let of_bias = bias.gradient(|| {
            let rows = Rows { inputs: [Values::F32(g.elements())], width: outputs };
            let zeros = || vec![0.0; outputs];
            let (_, sums): ([Vec<f32>; 0], _) = rows.fold(zeros, |sum, _, [g], []| {
                sum.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
            });
            Ok(in_order(outputs, sums))
        })?;
        Ok([of_x, of_weight, of_bias])
    }
}
