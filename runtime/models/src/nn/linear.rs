//! LinearOp layers.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use hsdp_kernels::{Fold, Matrix, Threads, matmul};

use super::composed;
use super::element::{LentTensor, check_dtypes, last_dim, rounded, wide, wide_gradient};
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
        Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, LinearOp),
        None => x.apply_op2(&weight, LinearOp),
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
    (x, x_layout): (&CpuStorage, &Layout),
    (weight, weight_layout): (&CpuStorage, &Layout),
    bias: Option<&[f32]>,
) -> Result<(CpuStorage, Shape)> {
    let mut dims = x_layout.dims().to_vec();
    let count = count(&dims);
    let inputs = dims.pop().unwrap_or_default();
    let outputs = weight_layout.dims()[0];
    let wide_x = wide(NAME, x, x_layout)?;
    let weight = wide(NAME, weight, weight_layout)?;
    let (mut y, fold) = match bias {
        Some(bias) => (bias.repeat(count), Fold::Add),
        None => (vec![0.0; count * outputs], Fold::Replace),
    };
    let factors = [Matrix::new(&wide_x, count, inputs), Matrix::new(&weight, outputs, inputs).t()];
    matmul(&mut y, fold, factors, Threads::Pool);
    dims.push(outputs);
    Ok((rounded(x.dtype(), y)?, dims.into()))
}

/// Returns the gradients of `x` and the weight that candle tracks.
fn backward([x, weight, g]: [&Tensor; 3]) -> Result<[Option<Tensor>; 2]> {
    let lent_x = LentTensor::of(x);
    let lent_weight = LentTensor::of(weight);
    let lent_g = LentTensor::of(g);
    let (outputs, inputs) = weight.dims2()?;
    let wide_g = lent_g.wide(NAME)?;
    let count = count(x.dims());
    let g = Matrix::new(&wide_g, count, outputs);
    let of_x = wide_gradient(x, || {
        let weight = lent_weight.wide(NAME)?;
        Ok(product([g, Matrix::new(&weight, outputs, inputs)], x))
    })?;
    let of_weight = wide_gradient(weight, || {
        let x = lent_x.wide(NAME)?;
        Ok(product([g.t(), Matrix::new(&x, count, inputs)], weight))
    })?;
    Ok([of_x, of_weight])
}

/// Computes a product with as many elements as a tensor.
fn product(factors: [Matrix<'_>; 2], like: &Tensor) -> Vec<f32> {
    let mut product = vec![0.0; like.elem_count()];
    matmul(&mut product, Fold::Replace, factors, Threads::Pool);
    product
}

/// Returns the gradient of the bias, the sum over the rows.
fn of_bias(bias: &Tensor, g: &Tensor) -> Result<Option<Tensor>> {
    let lent_g = LentTensor::of(g);
    let outputs = bias.elem_count();
    wide_gradient(bias, || {
        let g = lent_g.wide(NAME)?;
        let rows = Rows::<f32, 1> { inputs: [&g], width: outputs };
        let zeros = || vec![0.0; outputs];
        let ([], sums) = rows.fold(zeros, |sum, _, [g], []| {
            sum.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
        });
        Ok(in_order(outputs, sums))
    })
}

impl CustomOp2 for LinearOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        forward((x, x_layout), (weight, weight_layout), None)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        g: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let g = g.detach().contiguous()?;
        let [of_x, of_weight] = backward([x, weight, &g])?;
        Ok((of_x, of_weight))
    }
}

impl CustomOp3 for LinearOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let bias = wide(NAME, bias, bias_layout)?;
        forward((x, x_layout), (weight, weight_layout), Some(&bias))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        g: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let g = g.detach().contiguous()?;
        let [of_x, of_weight] = backward([x, weight, &g])?;
        Ok((of_x, of_weight, of_bias(bias, &g)?))
    }
}
