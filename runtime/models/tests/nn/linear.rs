//! Which gradients a linear layer rounds.

use candle_core::{DType, Device, Result, Tensor, Var};
use hsdp_models::nn;

/// Returns the gradient of the weight of the first of two linear layers, of one input and one
/// output. The gradients of its two outputs are 1 + 2^-9, which bf16 rounds to 1, and 1; its inputs
/// are 1 and -1.
fn gradient_of_first_weight(dtype: DType) -> Result<f32> {
    let bf16 = |values: &[f32], dims: &[usize]| {
        Tensor::from_slice(values, dims, &Device::Cpu)?.to_dtype(DType::BF16)
    };
    let first = Var::from_tensor(&Tensor::ones((1, 1), dtype, &Device::Cpu)?)?;
    let second = bf16(&[1.0, 2_f32.powi(-9)], &[2, 1])?;
    let x = bf16(&[1.0, -1.0], &[2, 1])?;
    let y = nn::linear(&nn::linear(&x, &first, None)?, &second, None)?;
    let loss = (y * bf16(&[1.0, 1.0, 1.0, 0.0], &[2, 2])?)?.sum_all()?;
    let gradients = loss.backward()?;
    gradients.get(&first).expect("a gradient").to_dtype(DType::F32)?.reshape(())?.to_scalar()
}

#[test]
fn the_gradient_of_an_output_is_rounded_if_both_factors_are_bf16() {
    assert_eq!(gradient_of_first_weight(DType::BF16).expect("a gradient"), 0.0);
    assert_eq!(gradient_of_first_weight(DType::F32).expect("a gradient"), 2_f32.powi(-9));
}
