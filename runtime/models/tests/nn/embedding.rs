//! Embeddings: rows by ids, and gradients of rows that several ids name.

use candle_core::{DType, Device, Result, Tensor, Var};
use hsdp_models::nn::{self, composed};

use crate::layers::{DTYPES, flat, noise};
use crate::refusals::says;

type Function = fn(&Tensor, &Tensor) -> Result<Tensor>;

const BOTH: [(&str, Function); 2] = [("fused", nn::embedding), ("composed", composed::embedding)];

fn ids(ids: &[u32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(ids, shape, &Device::Cpu).expect("ids")
}

/// The gradient of a weight, for the gradients `g` of the rows of these ids.
fn gradient(function: Function, weight: &Var, ids: &Tensor, g: &Tensor) -> Tensor {
    let y = function(ids, weight.as_tensor()).expect("rows");
    let loss = (y * g).expect("like g").sum_all().expect("a sum");
    let gradients = loss.backward().expect("gradients");
    gradients.get(weight.as_tensor()).expect("that of the weight").clone()
}

#[test]
fn rows_and_their_gradients_are_those_of_candle_in_f32() {
    let weight = Var::from_tensor(&noise(1, &[5, 3], DType::F32)).expect("a variable");
    let ids = ids(&[4, 0, 4, 2, 0, 4], &[2, 3]);
    let g = noise(2, &[2, 3, 3], DType::F32);
    let of_candle: Function =
        |ids, weight| weight.index_select(&ids.flatten_all()?, 0)?.reshape((2, 3, 3));
    let expected = of_candle(&ids, &weight).expect("rows");
    for (name, function) in BOTH {
        let y = function(&ids, &weight).expect("rows");
        assert_eq!((y.dims(), flat(&y)), (expected.dims(), flat(&expected)), "{name}");
        let [got, want] = [function, of_candle].map(|it| flat(&gradient(it, &weight, &ids, &g)));
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn gradients_of_a_row_are_summed_in_f32() {
    let of = |dtype, terms: &[f32]| {
        let weight = Var::zeros((2, 1), dtype, &Device::Cpu).expect("a variable");
        let g = Tensor::from_slice(terms, (terms.len(), 1), &Device::Cpu).expect("terms");
        let g = g.to_dtype(dtype).expect("cast");
        let ids = ids(&vec![1; terms.len()], &[terms.len()]);
        BOTH.map(|(_, function)| flat(&gradient(function, &weight, &ids, &g))[1])
    };
    assert_eq!(of(DType::BF16, &[1.0; 300]), [300.0; 2]);
    assert_eq!(of(DType::F16, &[60000.0, 60000.0, -60000.0]), [60000.0; 2]);
}

#[test]
fn a_weight_that_is_not_tracked_gets_no_gradient_and_no_ids_are_no_rows() {
    for (name, dtype) in DTYPES {
        let weight = noise(1, &[5, 3], dtype);
        let ids = ids(&[], &[2, 0]);
        for (_, function) in BOTH {
            let y = function(&ids, &weight).expect("no rows");
            assert_eq!((y.dims(), y.dtype()), (&[2, 0, 3][..], dtype), "{name}");
            assert!(!y.track_op(), "{name}");
        }
    }
}

#[test]
fn ids_without_a_row_are_refused() {
    let weight = noise(1, &[5, 3], DType::F32);
    for id in [5, u32::MAX - 1, u32::MAX] {
        let told = format!("embedding: id {id}, and the weight has 5 rows");
        says(nn::embedding(&ids(&[0, id], &[2]), &weight), &told);
    }
    let negative = Tensor::from_slice(&[-1_i64], 1, &Device::Cpu).expect("an id");
    says(nn::embedding(&negative, &weight), "embedding: id -1, and the weight has 5 rows");
    says(nn::embedding(&weight, &weight), "unsupported dtype F32 for op embedding");
    let flat = noise(1, &[5], DType::F32);
    let told = "embedding: the weight has the shape [5], and needs [rows, width]";
    says(nn::embedding(&ids(&[0], &[1]), &flat), told);
}

/// As with `padding_idx` in PyTorch: the row is read as it is, and gets no gradient.
#[test]
fn a_padding_row_is_read_and_gets_no_gradient() {
    for (_, dtype) in DTYPES {
        let mut values = flat(&noise(1, &[5, 3], dtype));
        values[6] = f32::INFINITY;
        let weight =
            Tensor::from_vec(values, (5, 3), &Device::Cpu).and_then(|it| it.to_dtype(dtype));
        let weight = Var::from_tensor(&weight.expect("a weight")).expect("a variable");
        let ids = ids(&[4, 2, 4, 2, 0, 2], &[2, 3]);
        let g = noise(2, &[2, 3, 3], dtype);
        let plain = nn::embedding(&ids, &weight).expect("rows");
        let mut expected = flat(&gradient(nn::embedding, &weight, &ids, &g));
        expected[6..9].fill(0.0);
        let fused: Function = |ids, weight| nn::padded_embedding(ids, weight, 2);
        let composed: Function = |ids, weight| composed::padded_embedding(ids, weight, 2);
        for function in [fused, composed] {
            assert_eq!(flat(&function(&ids, &weight).expect("rows")), flat(&plain));
            assert_eq!(flat(&gradient(function, &weight, &ids, &g)), expected);
        }
    }
    let weight = noise(1, &[5, 3], DType::F32);
    let told = "embedding: padding 5, and the weight has 5 rows";
    says(nn::padded_embedding(&ids(&[0], &[1]), &weight, 5), told);
}
