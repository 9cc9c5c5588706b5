//! Values and gradients are those of PyTorch, which golden.py wrote down.

use std::collections::HashMap;

use candle_core::{Device, Tensor};

use crate::attention::{exact, roundings};
use crate::layers::{DTYPES, LAYERS, Layer, flat, largest, rounding};

/// The error of f32 arithmetic, as a part of the largest element.
const F32: f32 = 1e-6;

type Golden = HashMap<String, Tensor>;

fn golden() -> Golden {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nn/golden.safetensors");
    candle_core::safetensors::load(path, &Device::Cpu).expect("a file of tensors")
}

/// Compares with f32 truth: an error of f32 arithmetic, one rounding, and `inner`, the error that
/// rounded factors of products may cause.
fn assert_true(got: &Tensor, truth: &Tensor, inner: &[f32], what: &str) {
    assert_eq!(got.dims(), truth.dims(), "{what}");
    let dtype = got.dtype();
    let got = flat(got);
    let truth = flat(truth);
    assert_eq!(inner.len(), got.len(), "{what}");
    let most = largest(&truth);
    for ((got, truth), inner) in got.iter().zip(&truth).zip(inner) {
        let bound = F32 * most + 1.001 * (rounding(dtype, truth.abs() + inner) + inner);
        assert!((got - truth).abs() <= bound, "{what}: {got} is not {truth}, within {bound}");
    }
}

fn compare(layer: &Layer, dtype: &str, golden: &Golden) {
    let of = |key: &str| golden[&format!("{}.{dtype}.{key}", layer.name)].clone();
    let input = |name: &&str| match *name {
        "labels" => golden["labels"].clone(),
        name => of(&format!("in.{name}")),
    };
    let inputs: Vec<Tensor> = layer.inputs.iter().map(input).collect();
    let g = of("in.g");
    for (form, function) in [("fused", layer.fused), ("composed", layer.composed)] {
        let got = layer.run(function, &inputs, &g);
        let inner: Vec<Vec<f32>> = match form {
            "fused" => roundings(layer, &inputs, &g),
            _ => exact(layer, &inputs, &g),
        };
        let what = |part: &str| format!("{form} {} in {dtype}, {part}", layer.name);
        assert_true(&got[0], &of("out"), &inner[0], &what("output"));
        let gradients = got[1..].iter().zip(&inner[1..]);
        for ((got, inner), (name, input)) in gradients.zip(layer.inputs.iter().zip(&inputs)) {
            assert_eq!(got.dtype(), input.dtype(), "{}", what(name));
            assert_true(got, &of(&format!("grad.{name}")), inner, &what(name));
        }
    }
}

#[test]
fn values_and_gradients_are_those_of_pytorch() {
    let golden = golden();
    for layer in &LAYERS {
        for (dtype, _) in DTYPES {
            compare(layer, dtype, &golden);
        }
    }
}
