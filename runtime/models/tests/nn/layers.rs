//! The layers as functions of a list of tensors, to run them all in one way; and comparisons.

use candle_core::{DType, Device, Result, Tensor, Var};
use hsdp_models::nn::{self, IGNORED, Mask, Scores, composed};

pub(crate) const DTYPES: [(&str, DType); 3] =
    [("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)];

pub(crate) const EPS: f64 = 1e-5;

/// Scores of the layers.
pub(crate) const ALL: Scores<'static> = Scores { scale: 1.0, cap: None, mask: Mask::None };
pub(crate) const CAUSAL: Scores<'static> = Scores { scale: 0.25, cap: None, mask: Mask::Causal };
pub(crate) const CAPPED: Scores<'static> = Scores { cap: Some(1.5), ..CAUSAL };
pub(crate) const WINDOW: Scores<'static> = Scores { mask: Mask::Window(3), ..CAUSAL };
pub(crate) const CAPPED_WINDOW: Scores<'static> = Scores { mask: Mask::Window(2), ..CAPPED };

type Function = fn(&[Tensor]) -> Result<Tensor>;

/// A layer as a function of its inputs, of which candle tracks the first `tracked`.
pub(crate) struct Layer {
    pub(crate) name: &'static str,
    pub(crate) inputs: &'static [&'static str],
    pub(crate) tracked: usize,
    pub(crate) fused: Function,
    pub(crate) composed: Function,
}

/// The layers, with the names of the golden file.
pub(crate) const LAYERS: [Layer; 22] = [
    Layer {
        name: "linear",
        inputs: &["x", "weight", "bias"],
        tracked: 3,
        fused: |i| nn::linear(&i[0], &i[1], Some(&i[2])),
        composed: |i| products_in_f32(i, |i| composed::linear(&i[0], &i[1], Some(&i[2]))),
    },
    Layer {
        name: "linear_alone",
        inputs: &["x", "weight"],
        tracked: 2,
        fused: |i| nn::linear(&i[0], &i[1], None),
        composed: |i| products_in_f32(i, |i| composed::linear(&i[0], &i[1], None)),
    },
    Layer {
        name: "attention",
        inputs: &["q", "k", "v"],
        tracked: 3,
        fused: |i| nn::attention([&i[0], &i[1], &i[2]], &CAUSAL),
        composed: |i| products_in_f32(i, |i| composed_attention(i, &CAUSAL)),
    },
    Layer {
        name: "attention_window",
        inputs: &["q", "k", "v"],
        tracked: 3,
        fused: |i| nn::attention([&i[0], &i[1], &i[2]], &WINDOW),
        composed: |i| products_in_f32(i, |i| composed_attention(i, &WINDOW)),
    },
    Layer {
        name: "attention_capped",
        inputs: &["q", "k", "v"],
        tracked: 3,
        fused: |i| nn::attention([&i[0], &i[1], &i[2]], &CAPPED),
        composed: |i| products_in_f32(i, |i| composed_attention(i, &CAPPED)),
    },
    Layer {
        name: "attention_packed",
        inputs: &["x"],
        tracked: 1,
        fused: |i| nn::attention_packed(&i[0], &CAUSAL),
        composed: |i| products_in_f32(i, |i| composed::attention_packed(&i[0], &CAUSAL)),
    },
    Layer {
        name: "attention_packed_capped_window",
        inputs: &["x"],
        tracked: 1,
        fused: |i| nn::attention_packed(&i[0], &CAPPED_WINDOW),
        composed: |i| products_in_f32(i, |i| composed::attention_packed(&i[0], &CAPPED_WINDOW)),
    },
    Layer {
        name: "rms_norm",
        inputs: &["x", "weight"],
        tracked: 2,
        fused: |i| nn::rms_norm(&i[0], &i[1], EPS),
        composed: |i| composed::rms_norm(&i[0], &i[1], EPS),
    },
    Layer {
        name: "layer_norm",
        inputs: &["x", "weight", "bias"],
        tracked: 3,
        fused: |i| nn::layer_norm(&i[0], &i[1], &i[2], EPS),
        composed: |i| composed::layer_norm(&i[0], &i[1], &i[2], EPS),
    },
    Layer {
        name: "softmax",
        inputs: &["x"],
        tracked: 1,
        fused: |i| nn::softmax(&i[0]),
        composed: |i| composed::softmax_of_scores(&i[0], &ALL),
    },
    Layer {
        name: "softmax_causal",
        inputs: &["x"],
        tracked: 1,
        fused: |i| nn::softmax_of_scores(&i[0], &CAUSAL),
        composed: |i| composed::softmax_of_scores(&i[0], &CAUSAL),
    },
    Layer {
        name: "softmax_window",
        inputs: &["x"],
        tracked: 1,
        fused: |i| nn::softmax_of_scores(&i[0], &WINDOW),
        composed: |i| composed::softmax_of_scores(&i[0], &WINDOW),
    },
    Layer {
        name: "softmax_capped_window",
        inputs: &["x"],
        tracked: 1,
        fused: |i| nn::softmax_of_scores(&i[0], &CAPPED_WINDOW),
        composed: |i| composed::softmax_of_scores(&i[0], &CAPPED_WINDOW),
    },
    Layer {
        name: "cross_entropy",
        inputs: &["logits", "labels"],
        tracked: 1,
        fused: |i| Ok(nn::cross_entropy(&i[0], &i[1], IGNORED)?.sum),
        composed: |i| Ok(composed::cross_entropy(&i[0], &i[1], IGNORED)?.sum),
    },
    Layer {
        name: "gelu",
        inputs: &["x"],
        tracked: 1,
        fused: |i| nn::gelu(&i[0]),
        composed: |i| composed::gelu(&i[0]),
    },
    Layer {
        name: "soft_cap",
        inputs: &["x"],
        tracked: 1,
        fused: |i| nn::soft_cap(&i[0], 1.5),
        composed: |i| composed::soft_cap(&i[0], 1.5),
    },
    Layer {
        name: "silu_mul",
        inputs: &["gate", "up"],
        tracked: 2,
        fused: |i| nn::silu_mul(&i[0], &i[1]),
        composed: |i| composed::silu_mul(&i[0], &i[1]),
    },
    Layer {
        name: "gelu_mul",
        inputs: &["gate", "up"],
        tracked: 2,
        fused: |i| nn::gelu_mul(&i[0], &i[1]),
        composed: |i| composed::gelu_mul(&i[0], &i[1]),
    },
    Layer {
        name: "rope",
        inputs: &["x", "cos", "sin"],
        tracked: 1,
        fused: |i| nn::rope(&i[0], &i[1], &i[2]),
        composed: |i| composed::rope(&i[0], &i[1], &i[2]),
    },
    Layer {
        name: "rope_partial",
        inputs: &["x", "cos", "sin"],
        tracked: 1,
        fused: |i| nn::rope(&i[0], &i[1], &i[2]),
        composed: |i| composed::rope(&i[0], &i[1], &i[2]),
    },
    Layer {
        name: "rope_interleaved",
        inputs: &["x", "cos", "sin"],
        tracked: 1,
        fused: |i| nn::rope_interleaved(&i[0], &i[1], &i[2]),
        composed: |i| composed::rope_interleaved(&i[0], &i[1], &i[2]),
    },
    Layer {
        name: "rope_interleaved_partial",
        inputs: &["x", "cos", "sin"],
        tracked: 1,
        fused: |i| nn::rope_interleaved(&i[0], &i[1], &i[2]),
        composed: |i| composed::rope_interleaved(&i[0], &i[1], &i[2]),
    },
];

fn composed_attention(inputs: &[Tensor], scores: &Scores<'_>) -> Result<Tensor> {
    composed::attention([&inputs[0], &inputs[1], &inputs[2]], scores)
}

/// The composed layers multiply matrices in the dtype that they get, and candle has no such product
/// of bf16 on the CPU.
fn products_in_f32(inputs: &[Tensor], layer: Function) -> Result<Tensor> {
    let wide: Result<Vec<Tensor>> = inputs.iter().map(|input| input.to_dtype(DType::F32)).collect();
    layer(&wide?)?.to_dtype(inputs[0].dtype())
}

impl Layer {
    /// The output, and the gradients of the tracked inputs if the output's gradient is `g`.
    pub(crate) fn run(&self, function: Function, inputs: &[Tensor], g: &Tensor) -> Vec<Tensor> {
        let (vars, constants) = inputs.split_at(self.tracked);
        let vars: Vec<Var> =
            vars.iter().map(|input| Var::from_tensor(input).expect("a variable")).collect();
        let inputs: Vec<Tensor> =
            vars.iter().map(|var| var.as_tensor().clone()).chain(constants.to_vec()).collect();
        let output = function(&inputs).expect("a forward");
        let seed = output.mul(&g.to_dtype(output.dtype()).expect("a cast")).expect("one shape");
        let gradients = seed.backward().expect("a backward");
        let of = |var: &Var| gradients.get(var).expect("a gradient").clone();
        std::iter::once(output).chain(vars.iter().map(of)).collect()
    }

    /// Returns inputs of a size for which threads share the work, and the gradient of the output.
    /// All are pseudorandom.
    pub(crate) fn large(&self, dtype: DType) -> (Vec<Tensor>, Tensor) {
        let shape = |name: &str| match (self.name, name) {
            ("softmax_causal" | "softmax_window" | "softmax_capped_window", _) => {
                vec![3, 5, 67, 71]
            }
            (_, "q") => vec![2, 131, 6, 24],
            (_, "k" | "v") => vec![2, 135, 2, 24],
            ("attention_packed" | "attention_packed_capped_window", _) => vec![2, 131, 3, 4, 24],
            ("linear" | "linear_alone", "weight") => vec![140, 131],
            ("linear", "bias") => vec![140],
            (_, "weight" | "bias") => vec![131],
            (_, "cos" | "sin") => vec![131, 19],
            ("rope" | "rope_interleaved", _) => vec![2, 129, 7, 38],
            ("rope_partial" | "rope_interleaved_partial", _) => vec![2, 129, 7, 43],
            (_, "labels") => vec![521],
            _ => vec![521, 131],
        };
        let input = |(number, name): (usize, &&str)| match *name {
            "labels" => labels(521, 131),
            name => noise(number, &shape(name), dtype),
        };
        let inputs: Vec<Tensor> = self.inputs.iter().enumerate().map(input).collect();
        let g = match self.name {
            "cross_entropy" => Tensor::new(0.5_f32, &Device::Cpu).expect("a scalar"),
            "linear" | "linear_alone" => noise(7, &[521, 140], dtype),
            "attention_packed" | "attention_packed_capped_window" => {
                noise(7, &[2, 131, 4, 24], dtype)
            }
            _ => noise(7, inputs[0].dims(), dtype),
        };
        (inputs, g)
    }
}

/// Numbers between -4 and 4.
pub(crate) fn noise(seed: usize, shape: &[usize], dtype: DType) -> Tensor {
    let mut state = seed as u64 + 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u64 << 21) as f32 - 4.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).expect("as many as elements");
    tensor.to_dtype(dtype).expect("a cast")
}

/// Labels of which every seventh is ignored.
pub(crate) fn labels(count: usize, classes: usize) -> Tensor {
    let label = |item: usize| match item % 7 {
        3 => IGNORED,
        _ => i64::try_from(item * 37 % classes).expect("a small number"),
    };
    Tensor::from_iter((0..count).map(label), &Device::Cpu).expect("a list")
}

/// Elements in f32.
pub(crate) fn flat(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.flatten_all().and_then(|flat| flat.to_dtype(DType::F32));
    flat.expect("f32").to_vec1().expect("one dim")
}

/// The largest magnitude.
pub(crate) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, value| value.abs().max(most))
}

/// Half the distance of neighbours of a dtype around `x`: what one rounding may change.
pub(crate) fn rounding(dtype: DType, x: f32) -> f32 {
    let power = f32::from_bits(x.to_bits() & 0x7f80_0000); // 2^n, where 2^n <= |x| < 2^(n + 1)
    match dtype {
        DType::BF16 => power.max(2_f32.powi(-126)) * 2_f32.powi(-8),
        DType::F16 => power.max(2_f32.powi(-14)) * 2_f32.powi(-11),
        _ => 0.0,
    }
}
