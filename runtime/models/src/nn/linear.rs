//! Linear layers.

use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use hsdp_kernels::{Fold, Matrix, Threads, matmul};

use super::composed;
use super::element::{LayerInput, check_dtypes, last_dim, rounded, wide_gradient};
use super::layer::{CpuLayer, LayerGradients, LayerOp};
use super::rows::{Rows, in_order};

const NAME: &str = "linear";

/// Computes `x W^T + b` on the last dim of `x`, with a weight `[outputs, inputs]` and an optional
/// bias `[outputs]`.
///
/// On the CPU the backward computes only the gradients that candle tracks, so a frozen weight costs
/// no time there. On a GPU this is [`composed::linear`].
///
/// # Errors
/// If the shapes do not fit, or a dtype is not f32, bf16 or f16.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    check_shapes(x, weight, bias)?;
    if !x.device().is_cpu() {
        return composed::linear(x, weight, bias);
    }
    let x = x.contiguous()?;
    let weight = weight.contiguous()?;
    match bias {
        Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, LayerOp(LinearOp)),
        None => x.apply_op2(&weight, LayerOp(LinearOp)),
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

/// Computes the outputs in a buffer that holds zeros or biases.
fn forward(
    x: LayerInput<'_>,
    weight: LayerInput<'_>,
    bias: Option<&[f32]>,
) -> Result<(CpuStorage, Shape)> {
    let mut dims = x.dims().to_vec();
    let count = count(&dims);
    let inputs = dims.pop().unwrap_or_default();
    let outputs = weight.dims()[0];
    let wide_x = x.wide(NAME)?;
    let weight = weight.wide(NAME)?;
    let (mut y, fold) = match bias {
        Some(bias) => (bias.repeat(count), Fold::Add),
        None => (vec![0.0; count * outputs], Fold::Replace),
    };
    let factors = [Matrix::new(&wide_x, count, inputs), Matrix::new(&weight, outputs, inputs).t()];
    matmul(&mut y, fold, factors, Threads::Pool);
    dims.push(outputs);
    Ok((rounded(x.dtype(), y)?, dims.into()))
}

/// Computes a product with as many elements as an input.
fn product(factors: [Matrix<'_>; 2], like: LayerInput<'_>) -> Vec<f32> {
    let mut product = vec![0.0; like.elem_count()];
    matmul(&mut product, Fold::Replace, factors, Threads::Pool);
    product
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
        g: LayerInput<'_>,
    ) -> Result<LayerGradients<2>> {
        let (outputs, inputs) = weight.dims2()?;
        let count = count(x.dims());
        let wide_g = g.wide(NAME)?;
        let g = Matrix::new(&wide_g, count, outputs);
        let of_x = wide_gradient(x, || {
            Ok(product([g, Matrix::new(&weight.wide(NAME)?, outputs, inputs)], x))
        })?;
        let of_weight = wide_gradient(weight, || {
            Ok(product([g.t(), Matrix::new(&x.wide(NAME)?, count, inputs)], weight))
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

    /// Computes the gradients of [`CpuLayer<2>`]. The gradient of the bias is the sum over the rows.
    fn backward(
        &self,
        [x, weight, bias]: [LayerInput<'_>; 3],
        g: LayerInput<'_>,
    ) -> Result<LayerGradients<3>> {
        let [of_x, of_weight] = self.backward([x, weight], g)?;
        let outputs = bias.elem_count();
        let of_bias = wide_gradient(bias, || {
            let g = g.wide(NAME)?;
            let rows = Rows::<f32, 1> { inputs: [&g], width: outputs };
            let zeros = || vec![0.0; outputs];
            let ([], sums) = rows.fold(zeros, |sum, _, [g], []| {
                sum.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
            });
            Ok(in_order(outputs, sums))
        })?;
        Ok([of_x, of_weight, of_bias])
    }
}
