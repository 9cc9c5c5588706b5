//! The fused layers are those made of candle's ops, on more elements than the golden file has.

use candle_core::{DType, Device, Tensor};
use hsdp_models::nn::{Mask, Scores, composed};

use crate::attention::roundings;
use crate::layers::{DTYPES, LAYERS, flat, largest, rounding};

/// The error of sums over hundreds of elements in f32, as a part of the largest element.
const F32: f32 = 2e-6;

/// Compares two roundings of nearly the same number, which give it or its neighbour. `inner` is the
/// error that rounded factors of products may cause.
fn assert_close(got: &Tensor, want: &Tensor, inner: &[f32], what: &str) {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    let got_values = flat(got);
    let want = flat(want);
    assert_eq!(inner.len(), want.len(), "{what}");
    let most = largest(&want);
    for ((got_value, want), inner) in got_values.iter().zip(&want).zip(inner) {
        let rounding = rounding(got.dtype(), want.abs() + inner);
        let bound = F32 * most + 2.001 * rounding + 1.001 * inner;
        let error = (got_value - want).abs();
        assert!(error <= bound, "{what}: {got_value} is not {want}, within {bound}");
    }
}

fn compare(dtype: DType, what: &str) {
    for layer in &LAYERS {
        let (inputs, g) = layer.large(dtype);
        let got = layer.run(layer.fused, &inputs, &g);
        let want = layer.run(layer.composed, &inputs, &g);
        let inner = roundings(layer, &inputs, &g);
        assert_eq!((got.len(), got.len()), (want.len(), inner.len()));
        for (index, ((got, want), inner)) in got.iter().zip(&want).zip(&inner).enumerate() {
            assert_close(got, want, inner, &format!("{} in {what}, tensor {index}", layer.name));
        }
    }
}

/// q k^T is 73728, above the largest number of f16, and 6517 when it is scaled.
#[test]
fn scores_that_are_finite_when_they_are_scaled_are_not_infinite_in_f16() {
    let all = Tensor::full(24.0_f32, (1, 2, 1, 128), &Device::Cpu).expect("a tensor");
    let all = all.to_dtype(DType::F16).expect("f16");
    let scale = 1.0 / 128_f64.sqrt();
    for cap in [None, Some(50.0)] {
        let scores = Scores { scale, cap, mask: Mask::Causal };
        let got = composed::attention([&all, &all, &all], &scores).expect("attended");
        assert_eq!(flat(&got), flat(&all));
    }
}

#[test]
fn fused_and_composed_layers_agree() {
    for (name, dtype) in DTYPES {
        compare(dtype, name);
    }
}
