//! Batch norm on one rank, against candle_nn's in f64 and central differences, and its refusals;
//! and on meshes, against one rank with the whole batch.

mod sharded;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{BatchNorm, ModuleT as _};
use hsdp::{DType as HsdpDType, Precision};
use hsdp_candle::{ForwardMode, Parameters, Plain};
use hsdp_models::nn::{self, BatchNormOptions, composed};
use hsdp_sharding::{ModelSpec, Param, Unit};

use crate::layers::{flat, largest, noise, rounding};
use crate::refusals::says;
use crate::threads::{bits, with_threads};

/// Batches of items with channels: alone, with a length, and with a height and a width.
const SHAPES: [&[usize]; 8] = [
    &[3, 2],
    &[7, 5],
    &[1, 3, 5],
    &[5, 3, 17],
    &[1, 1, 3, 3],
    &[3, 1, 4, 5],
    &[2, 13, 7, 9],
    &[521, 131],
];

/// The error of sums over hundreds of elements in f32, as a part of the largest element.
const F32: f32 = 2e-6;

type Layer = fn(&dyn Parameters, &str, &Tensor, BatchNormOptions) -> Result<Tensor>;

/// The tensors of a forward and a backward, by name.
type Tensors = BTreeMap<&'static str, Tensor>;

/// Values of a norm: the parameters and the running statistics before the forward.
fn values(channels: usize) -> BTreeMap<String, Vec<f32>> {
    let of = |seed| flat(&noise(seed, &[channels], DType::F32));
    let variances = of(14).iter().map(|it| it.abs() + 0.5).collect();
    let named = [
        ("weight", of(11)),
        ("bias", of(12)),
        ("running_mean", of(13)),
        ("running_var", variances),
    ];
    named.into_iter().map(|(name, values)| (format!("bn.{name}"), values)).collect()
}

/// A norm whose parameters are in `dtype`.
fn plain(channels: usize, dtype: DType, mode: ForwardMode) -> Plain {
    let spec = ModelSpec::new().unit(Unit::new("norm").batch_norm("bn", channels));
    let precision = Precision::compute_in(match dtype {
        DType::BF16 => HsdpDType::BF16,
        DType::F16 => HsdpDType::F16,
        _ => HsdpDType::F32,
    });
    let plain = Plain::new(spec, &values(channels), precision).expect("values for all");
    plain.in_mode(mode)
}

/// Runs a layer and the backward of its output, whose gradient is `g`.
fn run(layer: Layer, plain: &Plain, x: &Tensor, g: &Tensor) -> Tensors {
    let x = Var::from_tensor(x).expect("a variable");
    let y = layer(plain, "bn", x.as_tensor(), BatchNormOptions::default()).expect("a forward");
    let seed = y.mul(&g.to_dtype(y.dtype()).expect("a cast")).expect("one shape");
    let gradients = seed.backward().expect("a backward");
    let of = |var: &Var| gradients.get(var).expect("a gradient").clone();
    let parameters = plain.parameters();
    BTreeMap::from([
        ("y", y),
        ("gradient of x", of(&x)),
        ("gradient of weight", of(&parameters["bn.weight"])),
        ("gradient of bias", of(&parameters["bn.bias"])),
        ("running mean", plain.buffer("bn.running_mean").expect("a buffer")),
        ("running variance", plain.buffer("bn.running_var").expect("a buffer")),
    ])
}

/// Runs candle_nn's batch norm in f64, with the values of `plain`.
fn reference(plain: &Plain, x: &Tensor, g: &Tensor, train: bool) -> Tensors {
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64).expect("f64");
    let variable = |tensor: &Tensor| Var::from_tensor(&wide(tensor)).expect("a variable");
    let parameter = |name: &str| variable(plain.parameters()[name].as_tensor());
    let [weight, bias] = ["bn.weight", "bn.bias"].map(parameter);
    let [mean, variance] =
        ["bn.running_mean", "bn.running_var"].map(|it| wide(&plain.buffer(it).expect("a buffer")));
    let x = variable(x);
    let parameters = [&weight, &bias].map(|it| it.as_tensor().clone());
    let [of_weight, of_bias] = parameters;
    let norm = BatchNorm::new(weight.elem_count(), mean, variance, of_weight, of_bias, 1e-5);
    let norm = norm.expect("one length");
    let y = norm.forward_t(x.as_tensor(), train).expect("a forward");
    let gradients = y.mul(&wide(g)).and_then(|it| it.backward()).expect("a backward");
    let of = |var: &Var| gradients.get(var).expect("a gradient").clone();
    BTreeMap::from([
        ("y", y.clone()),
        ("gradient of x", of(&x)),
        ("gradient of weight", of(&weight)),
        ("gradient of bias", of(&bias)),
        ("running mean", norm.running_mean().clone()),
        ("running variance", norm.running_var().clone()),
    ])
}

/// Asserts that tensors differ by sums in f32, and by `roundings` to their own dtype.
fn assert_close(got: &Tensors, want: &Tensors, roundings: f32, what: &str) {
    assert_eq!(got.len(), want.len());
    for (name, got) in got {
        let (values, wanted) = (flat(got), flat(&want[name]));
        assert_eq!(got.dims(), want[name].dims(), "{name} of {what}");
        let most = largest(&wanted);
        for (got_value, want) in values.iter().zip(&wanted) {
            let bound = F32 * most + roundings * rounding(got.dtype(), *want);
            let error = (got_value - want).abs();
            assert!(error <= bound, "{name} of {what}: {got_value} is not {want}, within {bound}");
        }
    }
}

#[test]
fn a_training_forward_and_backward_are_candles_in_f64() {
    for shape in SHAPES {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let plain = plain(shape[1], dtype, ForwardMode::Training);
            let (x, g) = (noise(1, shape, dtype), noise(2, shape, dtype));
            let want = reference(&plain, &x, &g, true);
            let got = run(nn::batch_norm, &plain, &x, &g);
            assert_eq!((got["y"].dtype(), got["gradient of x"].dtype()), (dtype, dtype));
            assert_eq!(got["running mean"].dtype(), DType::F32);
            assert_close(&got, &want, 1.001, &format!("{shape:?} in {dtype:?}"));
        }
    }
}

/// The composed layer rounds twice where the fused one rounds once.
#[test]
fn the_composed_layer_agrees() {
    for mode in [ForwardMode::Training, ForwardMode::Evaluation] {
        for shape in SHAPES {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let (x, g) = (noise(1, shape, dtype), noise(2, shape, dtype));
                let tensors = |layer| run(layer, &plain(shape[1], dtype, mode), &x, &g);
                let got = tensors(nn::batch_norm);
                let want = tensors(composed::batch_norm);
                let what = format!("{shape:?} in {dtype:?}, {mode:?}");
                assert_close(&got, &want, 2.001, &what);
            }
        }
    }
}

#[test]
fn an_evaluation_normalizes_by_the_running_statistics() {
    for shape in SHAPES {
        let plain = plain(shape[1], DType::F32, ForwardMode::Evaluation);
        let (x, g) = (noise(1, shape, DType::F32), noise(2, shape, DType::F32));
        let want = reference(&plain, &x, &g, false);
        let got = run(nn::batch_norm, &plain, &x, &g);
        assert_close(&got, &want, 0.0, &format!("{shape:?}"));
        let before = values(shape[1]);
        assert_eq!(flat(&got["running mean"]), before["bn.running_mean"], "it moves nothing");
        assert_eq!(flat(&got["running variance"]), before["bn.running_var"], "it moves nothing");
    }
}

#[test]
fn gradients_are_central_differences() {
    let shape = [3, 2, 3];
    let x = noise(1, &shape, DType::F32);
    let g = noise(2, &shape, DType::F32);
    let trained = plain(2, DType::F32, ForwardMode::Training);
    let got = run(nn::batch_norm, &trained, &x, &g);
    let parameters = trained.parameters();
    let before = [flat(&x), flat(&parameters["bn.weight"]), flat(&parameters["bn.bias"])];
    let dot = |values: &[Vec<f32>; 3]| {
        let [x, weight, bias] = values;
        let trained = plain(2, DType::F32, ForwardMode::Training);
        for (name, values) in [("bn.weight", weight), ("bn.bias", bias)] {
            let values = Tensor::new(values.as_slice(), &Device::Cpu).expect("a list");
            trained.parameters()[name].set(&values).expect("one shape");
        }
        let x = Tensor::from_slice(x, &shape, &Device::Cpu).expect("as many as elements");
        let y = nn::batch_norm(&trained, "bn", &x, BatchNormOptions::default()).expect("a forward");
        flat(&y).iter().zip(flat(&g)).map(|(y, g)| f64::from(*y) * f64::from(g)).sum::<f64>()
    };
    for (input, name) in
        ["gradient of x", "gradient of weight", "gradient of bias"].iter().enumerate()
    {
        let gradient = flat(&got[name]);
        for (index, gradient) in gradient.iter().enumerate() {
            let moved = |by: f32| {
                let mut values = before.clone();
                values[input][index] += by;
                dot(&values)
            };
            // Four points, whose error is that of the fifth derivative.
            let [near, far] = [0.0625_f32, 0.125];
            let slope = |by: f32| (moved(by) - moved(-by)) / (2.0 * f64::from(by));
            let difference = (4.0 * slope(near) - slope(far)) / 3.0;
            let error = (difference - f64::from(*gradient)).abs();
            assert!(error <= 1e-3, "{name} {index}: {gradient}, difference {difference}");
        }
    }
}

#[test]
fn the_settings_count() {
    let shape = [5, 3];
    let (x, options) =
        (noise(1, &shape, DType::F32), BatchNormOptions { eps: 0.5, momentum: 0.75 });
    let layers: [Layer; 2] = [nn::batch_norm, composed::batch_norm];
    for layer in layers {
        let plain = plain(3, DType::F32, ForwardMode::Training);
        let tensor =
            |name: &str| Tensor::new(values(3)[name].as_slice(), &Device::Cpu).expect("a list");
        let [mean, variance, weight, bias] =
            ["bn.running_mean", "bn.running_var", "bn.weight", "bn.bias"].map(tensor);
        let norm = BatchNorm::new_with_momentum(3, mean, variance, weight, bias, 0.5, 0.75)
            .expect("a norm");
        let want = norm.forward_train(&x).expect("a forward");
        let got = layer(&plain, "bn", &x, options).expect("a forward");
        let buffer = |name| plain.buffer(name).expect("a buffer");
        for (got, want) in [
            (got, want),
            (buffer("bn.running_mean"), norm.running_mean().clone()),
            (buffer("bn.running_var"), norm.running_var().clone()),
        ] {
            let got = BTreeMap::from([("values", got)]);
            assert_close(&got, &BTreeMap::from([("values", want)]), 0.0, "other settings");
        }
    }
}

/// Two forwards move the running statistics twice.
#[test]
fn running_statistics_follow_each_batch() {
    let plain = plain(3, DType::F32, ForwardMode::Training);
    let batches = [1, 2].map(|seed| noise(seed, &[4, 3, 2], DType::F32));
    let g = noise(3, &[4, 3, 2], DType::F32);
    let first = reference(&plain, &batches[0], &g, true);
    let _ = run(nn::batch_norm, &plain, &batches[0], &g);
    let want = reference(&plain, &batches[1], &g, true);
    let got = run(nn::batch_norm, &plain, &batches[1], &g);
    assert_close(&got, &want, 0.0, "the second batch");
    assert_ne!(flat(&got["running mean"]), flat(&first["running mean"]));
}

/// The mean is subtracted before it is squared in f32, and its square is exact enough in f64.
#[test]
fn a_mean_far_from_zero_keeps_the_variance() {
    let shape = [31, 3, 5];
    let x = (noise(1, &shape, DType::F32) + 4096.0).expect("an offset");
    let g = noise(2, &shape, DType::F32);
    let plain = plain(3, DType::F32, ForwardMode::Training);
    let want = reference(&plain, &x, &g, true);
    let got = run(nn::batch_norm, &plain, &x, &g);
    assert_close(
        &BTreeMap::from([("running variance", got["running variance"].clone())]),
        &BTreeMap::from([("running variance", want["running variance"].clone())]),
        0.0,
        "an offset",
    );
    // A mean in f32 is off by half a step of numbers near 4096.
    let off = 4096.0 * f32::EPSILON / 2.0;
    let steepest = largest(&values(3)["bn.weight"]); // by one divided by a deviation above 2
    for (got, want) in flat(&got["y"]).iter().zip(flat(&want["y"])) {
        let bound = off * steepest / 2.0 + F32 * 8.0;
        assert!((got - want).abs() <= bound, "{got} is not {want}, within {bound}");
    }
}

#[test]
fn views_are_normalized_as_copies_are() {
    let wide = noise(1, &[4, 6, 7, 3], DType::F32);
    let view = wide.permute((0, 3, 1, 2)).and_then(|x| x.narrow(2, 1, 4)).expect("a view");
    let copy = view.force_contiguous().expect("a copy");
    let layers: [Layer; 2] = [nn::batch_norm, composed::batch_norm];
    for layer in layers {
        let y = |x: &Tensor| {
            let plain = plain(3, DType::F32, ForwardMode::Training);
            flat(&layer(&plain, "bn", x, BatchNormOptions::default()).expect("a forward"))
        };
        assert_eq!(y(&view), y(&copy));
    }
}

#[test]
fn one_thread_and_four_give_the_same_bits() {
    for shape in [&[521, 131][..], &[37, 13, 11, 13]] {
        for dtype in [DType::F32, DType::BF16] {
            let (x, g) = (noise(1, shape, dtype), noise(2, shape, dtype));
            let tensors = || {
                let plain = plain(shape[1], dtype, ForwardMode::Training);
                bits(&run(nn::batch_norm, &plain, &x, &g).into_values().collect::<Vec<_>>())
            };
            let one = with_threads(1, tensors);
            assert_eq!(one, with_threads(4, tensors), "{shape:?} in {dtype:?}");
            assert_eq!(one, with_threads(3, tensors), "{shape:?} in {dtype:?}");
        }
    }
}

/// The clamp of a variance below 0 must not hide it.
#[test]
fn a_nan_stays_one_in_its_channel() {
    let mut values = flat(&noise(1, &[4, 2], DType::F32));
    values[2] = f32::NAN; // channel 0 of the second item
    let x = Tensor::from_vec(values, (4, 2), &Device::Cpu).expect("as many as elements");
    let g = x.ones_like().expect("ones");
    let layers: [Layer; 2] = [nn::batch_norm, composed::batch_norm];
    for layer in layers {
        let plain = plain(2, DType::F32, ForwardMode::Training);
        for (name, tensor) in run(layer, &plain, &x, &g) {
            let (values, weight_or_bias) = (flat(&tensor), tensor.dims() == [2]);
            for (index, value) in values.iter().enumerate() {
                let is_first = if weight_or_bias { index == 0 } else { index % 2 == 0 };
                let is_nan = is_first && name != "gradient of bias";
                assert_eq!(value.is_nan(), is_nan, "{name}[{index}] is {value}");
            }
        }
    }
}

/// A channel of equal values has the variance 0, not a NaN below it, though their squares round.
#[test]
fn equal_values_have_no_variance() {
    let options = BatchNormOptions { eps: 1e-12, ..BatchNormOptions::default() };
    let layers = [nn::batch_norm, nn::composed::batch_norm];
    for (value, layer) in
        [0.1_f32, 1_234_567.9].into_iter().flat_map(|it| layers.map(|on| (it, on)))
    {
        let x = Tensor::full(value, (49, 2), &Device::Cpu).expect("a tensor");
        let plain = plain(2, DType::F32, ForwardMode::Training);
        let y = layer(&plain, "bn", &x, options).expect("a forward");
        let before = values(2);
        for (y, bias) in flat(&y).chunks(2).flat_map(|row| row.iter().zip(&before["bn.bias"])) {
            assert!((y - bias).abs() <= 1e-4, "{y} of {value} is not the bias {bias}");
        }
        let variance = flat(&plain.buffer("bn.running_var").expect("a buffer"));
        for (got, before) in variance.iter().zip(&before["bn.running_var"]) {
            assert!((got - 0.9 * before).abs() <= F32 * before, "{got} after {before}");
        }
    }
}

/// candle would keep a gradient that nobody wants.
#[test]
fn data_gets_no_gradient() {
    let plain = plain(3, DType::F32, ForwardMode::Training);
    let x = noise(1, &[4, 3], DType::F32);
    let y = nn::batch_norm(&plain, "bn", &x, BatchNormOptions::default()).expect("a forward");
    let gradients = y.backward().expect("a backward");
    assert!(gradients.get(&x).is_none(), "x is data");
    assert!(gradients.get(&plain.parameters()["bn.weight"]).is_some());
}

#[test]
fn refusals() {
    let training = |channels| plain(channels, DType::F32, ForwardMode::Training);
    let of =
        |plain: &Plain, x: &Tensor| nn::batch_norm(plain, "bn", x, BatchNormOptions::default());
    let zeros = |dims: &[usize]| noise(0, dims, DType::F32);
    let channels = "its second dim is the channels";
    for dims in [&[3][..], &[]] {
        says(
            of(&training(3), &zeros(dims)),
            &format!("batch_norm: bn.weight has the shape [3], and x has {dims:?}: {channels}"),
        );
    }
    says(
        of(&training(3), &zeros(&[2, 4])),
        &format!("batch_norm: bn.weight has the shape [3], and x has [2, 4]: {channels}"),
    );
    // Each of the four tensors has another length in turn.
    for mode in [ForwardMode::Training, ForwardMode::Evaluation] {
        for (index, name) in ["weight", "bias", "running_mean", "running_var"].iter().enumerate() {
            let plain = of_lengths(index, 4).in_mode(mode);
            let error = of(&plain, &zeros(&[2, 3])).expect_err("another length").to_string();
            assert!(
                error.starts_with(&format!("batch_norm: bn.{name} has the shape [4]")),
                "{error}"
            );
        }
    }
    for (dims, count) in [(&[1, 3][..], 1), (&[1, 3, 1, 1], 1), (&[0, 3], 0), (&[2, 3, 0], 0)] {
        let message =
            format!("batch_norm: a batch has {count} values a channel, and a variance needs two");
        says(of(&training(3), &zeros(dims)), &message);
        let evaluated = of(&plain(3, DType::F32, ForwardMode::Evaluation), &zeros(dims));
        assert_eq!(evaluated.expect("an evaluation needs none").dims(), dims);
    }
    let without_mode = Plain::new(
        ModelSpec::new().unit(Unit::new("norm").batch_norm("bn", 3)),
        &values(3),
        Precision::default(),
    );
    says(
        of(&without_mode.expect("values for all"), &zeros(&[2, 3])),
        "a layer computes another function in an evaluation than in training: set one of the two \
         with `Plain::in_mode`",
    );
    for mode in [ForwardMode::Training, ForwardMode::Evaluation] {
        says(
            of(&plain(3, DType::F32, mode), &noise(0, &[2, 3], DType::F64)),
            "unsupported dtype F64 for op batch_norm",
        );
        says(
            nn::batch_norm(
                &plain(3, DType::F32, mode),
                "norm",
                &zeros(&[2, 3]),
                BatchNormOptions::default(),
            ),
            "the model has no parameter norm.weight",
        );
    }
    // The buffers alone are missing.
    let tensor = |name: &str| Param::new(name, [3]);
    let spec = Unit::new("norm").param(tensor("bn.weight")).param(tensor("bn.bias"));
    let plain = Plain::new(ModelSpec::new().unit(spec), &values(3), Precision::default());
    let plain = plain.expect("values for all").in_mode(ForwardMode::Training);
    says(of(&plain, &zeros(&[2, 3])), "the model has no buffer bn.running_mean");
}

/// A norm over three channels. The tensor at `index` has another length.
fn of_lengths(index: usize, len: usize) -> Plain {
    let names = ["weight", "bias", "running_mean", "running_var"];
    let lens: Vec<usize> = (0..4).map(|at| if at == index { len } else { 3 }).collect();
    let unit = names.iter().zip(&lens).fold(Unit::new("norm"), |unit, (name, len)| {
        let param = Param::new(format!("bn.{name}"), [*len]);
        unit.param(if name.starts_with("running") { param.buffer() } else { param })
    });
    let values = names
        .iter()
        .zip(&lens)
        .map(|(name, len)| (format!("bn.{name}"), vec![1.0; *len]))
        .collect();
    let spec = ModelSpec::new().unit(unit);
    Plain::new(spec, &values, Precision::default()).expect("values for all")
}
