//! Inputs that a layer does not take are errors that name the layer and the shapes.

use candle_core::{DType, Device, Result, Tensor, Var};
use hsdp_models::nn::{self, IGNORED, Mask, Scores};

use crate::layers::{ALL, EPS, noise};

fn zeros(shape: &[usize]) -> Tensor {
    noise(0, shape, DType::F32)
}

fn doubles(shape: &[usize]) -> Tensor {
    noise(0, shape, DType::F64)
}

pub(crate) fn says(result: Result<Tensor>, message: &str) {
    let error = result.expect_err(message).to_string();
    let first = error.lines().next().unwrap_or_default();
    assert_eq!(first, message);
}

#[test]
fn norms() {
    let x = zeros(&[2, 4]);
    let short = zeros(&[3]);
    let needs = "and the last dim of x, [2, 4], needs one dim of its length";
    says(
        nn::rms_norm(&x, &short, EPS),
        &format!("rms_norm: the weight has the shape [3], {needs}"),
    );
    says(nn::rms_norm(&x, &x, EPS), &format!("rms_norm: the weight has the shape [2, 4], {needs}"));
    let weight = zeros(&[4]);
    says(
        nn::layer_norm(&x, &weight, &short, EPS),
        &format!("layer_norm: the bias has the shape [3], {needs}"),
    );
    says(nn::rms_norm(&zeros(&[]), &weight, EPS), "rms_norm: a scalar has no last dim");
    says(
        nn::layer_norm(&doubles(&[2, 4]), &weight, &weight, EPS),
        "unsupported dtype F64 for op layer_norm",
    );
    says(nn::rms_norm(&x, &doubles(&[4]), EPS), "unsupported dtype F64 for op rms_norm");
}

#[test]
fn linear() {
    let x = zeros(&[2, 4]);
    let weight = zeros(&[3, 4]);
    let needs = "and the last dim of x, [2, 4], needs [outputs, 4]";
    for dims in [&[4, 3][..], &[4], &[1, 3, 4]] {
        let shape = format!("linear: the weight has the shape {dims:?}, {needs}");
        says(nn::linear(&x, &zeros(dims), None), &shape);
    }
    says(
        nn::linear(&x, &weight, Some(&zeros(&[4]))),
        "linear: the bias has the shape [4], and the weight needs [3]",
    );
    says(nn::linear(&zeros(&[]), &weight, None), "linear: a scalar has no last dim");
    for (x, weight, bias) in [
        (doubles(&[2, 4]), weight.clone(), zeros(&[3])),
        (x.clone(), doubles(&[3, 4]), zeros(&[3])),
        (x, weight, doubles(&[3])),
    ] {
        says(nn::linear(&x, &weight, Some(&bias)), "unsupported dtype F64 for op linear");
    }
}

#[test]
fn attention() {
    let causal = Scores { mask: Mask::Causal, ..ALL };
    let of = |q: &Tensor, k: &Tensor, v: &Tensor| nn::attention([q, k, v], &causal);
    let q = zeros(&[2, 5, 4, 8]);
    let k = zeros(&[2, 5, 2, 8]);
    let needs = "they need one dtype, [batch, queries, heads, dim], and twice [batch, keys, key-value heads, dim], where the number of key-value heads divides that of heads";
    for dims in [[2, 5, 3, 8], [1, 5, 2, 8], [2, 5, 2, 7], [2, 5, 0, 8]] {
        let other = zeros(&dims);
        let shape = format!(
            "attention: q is f32 [2, 5, 4, 8], k is f32 {dims:?} and v is f32 {dims:?}: {needs}"
        );
        says(of(&q, &other, &other), &shape);
    }
    says(
        of(&q, &k, &zeros(&[2, 6, 2, 8])),
        &format!(
            "attention: q is f32 [2, 5, 4, 8], k is f32 [2, 5, 2, 8] and v is f32 [2, 6, 2, 8]: {needs}"
        ),
    );
    says(
        of(&q, &noise(0, &[2, 5, 2, 8], DType::BF16), &k),
        &format!(
            "attention: q is f32 [2, 5, 4, 8], k is bf16 [2, 5, 2, 8] and v is f32 [2, 5, 2, 8]: {needs}"
        ),
    );
    let few = zeros(&[2, 4, 2, 8]);
    says(
        of(&q, &few, &few),
        "attention: scores [2, 4, 5, 4] have no causal mask: it needs at most as many queries as keys",
    );
    let mask = zeros(&[5, 4]);
    says(
        nn::attention([&q, &k, &k], &Scores { mask: Mask::Additive(&mask), ..ALL }),
        "attention: a mask [5, 4] does not fit scores [2, 4, 5, 5]",
    );
    says(
        nn::attention([&q, &k, &k], &Scores { mask: Mask::Additive(&doubles(&[5, 5])), ..ALL }),
        "unsupported dtype F64 for op attention",
    );
    let wide = doubles(&[2, 5, 2, 8]);
    says(of(&wide, &wide, &wide), "unsupported dtype F64 for op attention");
    says(
        nn::attention_packed(&zeros(&[2, 5, 4, 2, 8]), &ALL),
        "attention: qkv has the shape [2, 5, 4, 2, 8], not [batch, length, 3, heads, dim]",
    );
}

#[test]
fn softmax() {
    says(nn::softmax(&zeros(&[])), "softmax: a scalar has no last dim");
    says(nn::softmax(&doubles(&[2])), "unsupported dtype F64 for op softmax");
    let causal = |x: &Tensor| nn::softmax_of_scores(x, &Scores { mask: Mask::Causal, ..ALL });
    let needs = "have no causal mask: it needs at most as many queries as keys";
    says(causal(&zeros(&[5])), &format!("softmax: scores [5] {needs}"));
    says(causal(&zeros(&[2, 5, 4])), &format!("softmax: scores [2, 5, 4] {needs}"));
    let masked = |mask: &Tensor| {
        nn::softmax_of_scores(&zeros(&[2, 4]), &Scores { mask: Mask::Additive(mask), ..ALL })
    };
    says(masked(&zeros(&[3, 4])), "softmax: a mask [3, 4] does not fit scores [2, 4]");
    says(masked(&zeros(&[2, 1])), "softmax: a mask [2, 1] does not fit scores [2, 4]");
    says(masked(&zeros(&[])), "softmax: a mask [] does not fit scores [2, 4]");
    let learned = Var::from_tensor(&zeros(&[2, 4])).expect("a variable");
    says(
        masked(&learned),
        "softmax: candle tracks the gradient of the mask, which has none: detach it",
    );
}

#[test]
fn windows_and_caps() {
    let q = zeros(&[2, 5, 4, 8]);
    let few = zeros(&[2, 4, 2, 8]);
    let qkv = zeros(&[2, 5, 3, 2, 8]);
    let square = zeros(&[2, 5, 5]);
    let refused = |scores: Scores<'_>, message: &str| {
        says(nn::attention([&q, &q, &q], &scores), &format!("attention: {message}"));
        says(nn::attention_packed(&qkv, &scores), &format!("attention: {message}"));
        says(nn::softmax_of_scores(&square, &scores), &format!("softmax: {message}"));
    };
    let empty = Scores { mask: Mask::Window(0), ..ALL };
    refused(empty, "a window of 0 keys leaves none: it needs at least one");
    for cap in [0.0, -50.0, f64::NAN, f64::INFINITY, 1e39, 1e-42] {
        let message = format!("the cap is {cap:?}: it must be positive and finite in f32");
        refused(Scores { cap: Some(cap), ..ALL }, &message);
        says(nn::soft_cap(&q, cap), &format!("soft_cap: {message}"));
    }
    let needs = "have no window: it needs at most as many queries as keys";
    let window = Scores { mask: Mask::Window(2), ..ALL };
    says(
        nn::attention([&q, &few, &few], &window),
        &format!("attention: scores [2, 4, 5, 4] {needs}"),
    );
    for dims in [&[5][..], &[2, 5, 4]] {
        let message = format!("softmax: scores {dims:?} {needs}");
        says(nn::softmax_of_scores(&zeros(dims), &window), &message);
    }
    says(nn::soft_cap(&doubles(&[2]), 1.0), "unsupported dtype F64 for op soft_cap");
}

#[test]
fn activations() {
    says(nn::gelu(&doubles(&[2])), "unsupported dtype F64 for op gelu");
    says(
        nn::silu_mul(&zeros(&[2, 3]), &zeros(&[3, 2])),
        "silu_mul: gate is f32 [2, 3] and up is f32 [3, 2]: both must be alike",
    );
    says(
        nn::gelu_mul(&zeros(&[2]), &noise(0, &[2], DType::BF16)),
        "gelu_mul: gate is f32 [2] and up is bf16 [2]: both must be alike",
    );
}

#[test]
fn rope() {
    let x = zeros(&[4, 2, 6]);
    let table = zeros(&[4, 3]);
    let short = zeros(&[3, 3]);
    let fits = "do not fit [..., length, heads, dim] and twice [positions, pairs], \
                where 2 pairs are at most dim";
    says(
        nn::rope(&x, &short, &short),
        &format!("rope: x [4, 2, 6], cos [3, 3] and sin [3, 3] {fits}"),
    );
    says(
        nn::rope(&x, &table, &short),
        &format!("rope: x [4, 2, 6], cos [4, 3] and sin [3, 3] {fits}"),
    );
    says(
        nn::rope_interleaved(&zeros(&[4, 6]), &table, &table),
        &format!("rope_interleaved: x [4, 6], cos [4, 3] and sin [4, 3] {fits}"),
    );
    says(
        nn::rope(&zeros(&[4, 2, 5]), &table, &table),
        &format!("rope: x [4, 2, 5], cos [4, 3] and sin [4, 3] {fits}"),
    );
    let learned = Var::from_tensor(&table).expect("a variable");
    says(
        nn::rope(&x, &learned, &table),
        "rope: candle tracks the gradient of cos or sin, which have none: detach them",
    );
}

#[test]
fn cross_entropy() {
    let loss = |logits: &Tensor, labels: &Tensor| {
        nn::cross_entropy(logits, labels, IGNORED).map(|loss| loss.sum)
    };
    let labels = |labels: &[i64]| Tensor::new(labels, &Device::Cpu).expect("labels");
    let logits = zeros(&[2, 4]);
    let range = "is neither below 4 nor -100, which is ignored";
    says(loss(&logits, &labels(&[3, 4])), &format!("cross_entropy: label 4 of item 1 {range}"));
    says(loss(&logits, &labels(&[-1, 0])), &format!("cross_entropy: label -1 of item 0 {range}"));
    says(
        loss(&logits, &labels(&[1])),
        "cross_entropy: logits [2, 4] need labels of their shape without its last dim, not [1]",
    );
    says(loss(&logits, &zeros(&[2])), "cross_entropy: labels are i64 or u32, not f32");
    says(loss(&zeros(&[]), &labels(&[1])), "cross_entropy: a scalar has no last dim");
    says(loss(&doubles(&[2, 4]), &labels(&[1, 1])), "unsupported dtype F64 for op cross_entropy");
}
