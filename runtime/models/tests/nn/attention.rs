//! Rounding to bf16 in attention: that the gradient of the output is rounded, and how large the
//! error of rounded factors can be.

use candle_core::{DType, Device, Result, Tensor, Var};
use hsdp_models::nn::{self, Scores, composed};

use crate::layers::{ALL, CAPPED, CAPPED_WINDOW, CAUSAL, Layer, WINDOW, flat};

/// The largest error of a rounding to bf16, as a part of the number.
const BF16: f64 = 1.0 / 256.0;

/// Returns the error that rounded factors may cause in each element of the layer's output and of
/// the gradients of its tracked inputs. The gradient of the output is in the dtype of the inputs,
/// so it is not rounded.
pub(crate) fn roundings(layer: &Layer, inputs: &[Tensor], g: &Tensor) -> Vec<Vec<f32>> {
    let scores = match layer.name {
        "attention" | "attention_packed" => CAUSAL,
        "attention_window" => WINDOW,
        "attention_capped" => CAPPED,
        "attention_packed_capped_window" => CAPPED_WINDOW,
        _ => return exact(layer, inputs, g),
    };
    if inputs[0].dtype() != DType::BF16 {
        return exact(layer, inputs, g);
    }
    let bounds = if inputs.len() == 1 {
        let [q, k, v] = [0, 1, 2].map(|it| inputs[0].narrow(2, it, 1).and_then(|it| it.squeeze(2)));
        of_packed([&q.expect("q"), &k.expect("k"), &v.expect("v")], g, &scores)
    } else {
        of_attention([&inputs[0], &inputs[1], &inputs[2]], g, &scores).map(Vec::from)
    };
    bounds.expect("bounds").iter().map(flat).collect()
}

/// Returns zeros for the output and each tracked input of a layer that rounds no factor.
pub(crate) fn exact(layer: &Layer, inputs: &[Tensor], g: &Tensor) -> Vec<Vec<f32>> {
    let tensors = std::iter::once(g).chain(&inputs[..layer.tracked]);
    tensors.map(|it| vec![0.0; it.elem_count()]).collect()
}

fn of_packed(qkv: [&Tensor; 3], g: &Tensor, scores: &Scores<'_>) -> Result<Vec<Tensor>> {
    let [output, q, k, v] = of_attention(qkv, g, scores)?;
    Ok(vec![output, Tensor::stack(&[q, k, v], 2)?])
}

/// Returns the bounds for the output and the gradients of `q`, `k` and `v`. A rounded factor is
/// wrong by at most [`BF16`] of itself, so a product is wrong by at most the product of these
/// errors and the magnitudes of the other factor.
fn of_attention([q, k, v]: [&Tensor; 3], g: &Tensor, scores: &Scores<'_>) -> Result<[Tensor; 4]> {
    let (batch, keys, kv_heads, dim) = k.dims4()?;
    let shared = q.dim(2)? / kv_heads;
    let by_head = |it: &Tensor| it.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
    let of_each_head = |it: &Tensor| {
        let heads = by_head(it)?.unsqueeze(2)?.repeat((1, 1, shared, 1, 1))?;
        heads.reshape((batch, kv_heads * shared, keys, dim))
    };
    let [q, g] = [by_head(q)?, by_head(g)?];
    let [k, v] = [of_each_head(k)?, of_each_head(v)?];

    let products = Var::from_tensor(&q.matmul(&k.t()?)?)?;
    let shares = composed::softmax_of_scores(&products, scores)?;
    let gradients = (shares.matmul(&v)? * &g)?.sum_all()?.backward()?;
    let of_products = (gradients.get(&products).expect("a gradient").abs()? * BF16)?;
    let shares = (shares.detach() * BF16)?;

    let by_position = |it: Tensor| it.transpose(1, 2)?.contiguous();
    let of_kv_head =
        |it: Tensor| by_position(it.reshape((batch, kv_heads, shared, keys, dim))?.sum(2)?);
    Ok([
        by_position(shares.matmul(&v.abs()?)?)?,
        by_position(of_products.matmul(&k.abs()?)?)?,
        of_kv_head(of_products.t()?.contiguous()?.matmul(&q.abs()?)?)?,
        of_kv_head(shares.t()?.contiguous()?.matmul(&g.abs()?)?)?,
    ])
}

/// Returns the gradient of the value of one key that two queries see. The gradients of their
/// outputs are 1 + 2^-9, which bf16 rounds to 1, and -1.
fn gradient_of_value(dtype: DType) -> Result<f32> {
    let tensor = |values: &[f32], dims: &[usize], dtype: DType| {
        Tensor::from_slice(values, dims, &Device::Cpu)?.to_dtype(dtype)
    };
    let q = Tensor::ones((1, 2, 1, 1), dtype, &Device::Cpu)?;
    let kv = Tensor::ones((1, 1, 1, 1), dtype, &Device::Cpu)?;
    let v = Var::from_tensor(&kv)?;
    let y = nn::attention([&q, &kv, &v], &ALL)?.reshape((2, 1))?;
    let weight = tensor(&[1.0, 2_f32.powi(-9)], &[2, 1], DType::F32)?;
    let signs = tensor(&[1.0, 1.0, -1.0, 0.0], &[2, 2], dtype)?;
    let gradients = (nn::linear(&y, &weight, None)? * signs)?.sum_all()?.backward()?;
    gradients.get(&v).expect("a gradient").to_dtype(DType::F32)?.reshape(())?.to_scalar()
}

#[test]
fn the_gradient_of_an_output_is_rounded_if_the_inputs_are_bf16() {
    assert_eq!(gradient_of_value(DType::BF16).expect("a gradient"), 0.0);
    assert_eq!(gradient_of_value(DType::F32).expect("a gradient"), 2_f32.powi(-9));
}
