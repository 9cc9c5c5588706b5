//! Shapes of all kinds: one to four dims, rows of one element, views, tensors without elements; and
//! labels.

use candle_core::{DType, Device, Result, Tensor, Var};
use hsdp_models::nn::{self, IGNORED, Mask, Scores, composed};

use crate::layers::{ALL, DTYPES, EPS, LAYERS, flat, labels, noise};
use crate::threads::bits;

const SHAPES: [&[usize]; 9] =
    [&[1], &[17], &[3, 1], &[1, 16], &[5, 33], &[2, 3, 7], &[1, 1, 1, 1], &[2, 1, 3, 40], &[0, 4]];

/// A layer of one tensor, whose weights are made to fit.
type OfOne = fn(&Tensor) -> Result<Tensor>;

fn weight(x: &Tensor) -> Tensor {
    let last = *x.dims().last().expect("a last dim");
    noise(3, &[last], x.dtype())
}

/// Scores with half of the products.
const HALF: Scores<'static> = Scores { scale: 0.5, ..ALL };

const OF_ONE: [(&str, OfOne, OfOne); 7] = [
    ("rms_norm", |x| nn::rms_norm(x, &weight(x), EPS), |x| composed::rms_norm(x, &weight(x), EPS)),
    (
        "layer_norm",
        |x| nn::layer_norm(x, &weight(x), &weight(x), EPS),
        |x| composed::layer_norm(x, &weight(x), &weight(x), EPS),
    ),
    ("softmax", nn::softmax, |x| composed::softmax_of_scores(x, &ALL)),
    ("gelu", nn::gelu, composed::gelu),
    ("soft_cap", |x| nn::soft_cap(x, 2.0), |x| composed::soft_cap(x, 2.0)),
    ("silu_mul", |x| nn::silu_mul(x, x), |x| composed::silu_mul(x, x)),
    ("gelu_mul", |x| nn::gelu_mul(x, x), |x| composed::gelu_mul(x, x)),
];

/// The output and the gradient of the sum of its squares.
fn run(layer: OfOne, x: &Tensor) -> [Tensor; 2] {
    let x = Var::from_tensor(x).expect("a variable");
    let output = layer(x.as_tensor()).expect("a forward");
    let gradients = output.sqr().and_then(|y| y.backward()).expect("a backward");
    [output, gradients.get(&x).expect("a gradient").clone()]
}

fn assert_near(got: &Tensor, want: &Tensor, what: &str) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    for (got, want) in flat(got).iter().zip(&flat(want)) {
        assert!((got - want).abs() <= 1e-4 * want.abs().max(1.0), "{what}: {got} is not {want}");
    }
}

#[test]
fn any_number_of_dims() {
    for shape in SHAPES {
        for (name, fused, composed) in OF_ONE {
            let x = noise(1, shape, DType::F32);
            if x.elem_count() == 0 {
                assert_eq!(fused(&x).expect("nothing to compute").dims(), shape, "{name}");
                continue;
            }
            let got = run(fused, &x);
            let want = run(composed, &x);
            for (got, want) in got.iter().zip(&want) {
                assert_near(got, want, &format!("{name} of {shape:?}"));
            }
        }
    }
}

#[test]
fn views_and_broadcast_gradients() {
    for (_, dtype) in DTYPES {
        let wide = noise(1, &[6, 4, 10], dtype);
        let view = wide.transpose(0, 1).and_then(|x| x.narrow(2, 3, 5)).expect("a view");
        let copy = view.force_contiguous().expect("a copy");
        for (name, fused, _) in OF_ONE {
            let gradient = |x: &Tensor| {
                let x = Var::from_tensor(x).expect("a variable");
                let same = x.as_tensor().transpose(0, 1).and_then(|x| x.contiguous());
                let view = same.and_then(|x| x.transpose(0, 1)).expect("a view of a copy");
                let sum = fused(&view).and_then(|y| y.sum_all()).expect("a forward");
                flat(sum.backward().expect("a backward").get(&x).expect("a gradient"))
            };
            let values = |x: &Tensor| flat(&fused(x).expect("a forward"));
            assert_eq!(values(&view), values(&copy), "{name}");
            let direct = |x: &Tensor| {
                let x = Var::from_tensor(x).expect("a variable");
                let ones = x.ones_like().expect("ones");
                let y = fused(x.as_tensor()).and_then(|y| y.mul(&ones)).expect("a forward");
                flat(y.backward().expect("a backward").get(&x).expect("a gradient"))
            };
            assert_eq!(gradient(&copy), direct(&copy), "{name}");
        }
    }
}

#[test]
fn masks_of_all_kinds() {
    let scores = noise(1, &[2, 3, 4, 9], DType::F32);
    let hide = |mask: &Tensor| mask.gt(1.0).and_then(|hidden| hidden.to_dtype(DType::F32));
    for shape in [&[9][..], &[4, 9], &[3, 1, 9], &[2, 1, 1, 9], &[2, 3, 4, 9], &[1, 1, 4, 9]] {
        let mask = noise(2, shape, DType::F32);
        let mask = hide(&mask).and_then(|hidden| hidden * -1e30).expect("a mask");
        for (_, dtype) in DTYPES.iter().take(2) {
            let mask = &mask.to_dtype(*dtype).expect("a cast");
            for cap in [None, Some(1.5)] {
                let how = Scores { cap, mask: Mask::Additive(mask), ..HALF };
                let got = nn::softmax_of_scores(&scores, &how).expect("shares");
                let want = composed::softmax_of_scores(&scores, &how).expect("shares");
                assert_near(&got, &want, &format!("a mask {shape:?} and a cap {cap:?}"));
            }
        }
    }
}

#[test]
fn an_additive_mask_takes_part_in_the_backward() {
    for shape in [&[9][..], &[4, 9], &[3, 1, 9], &[2, 1, 1, 9]] {
        let mask = noise(2, shape, DType::F32);
        let weights = noise(3, &[2, 3, 4, 9], DType::F32);
        let gradient = |softmax: fn(&Tensor, &Scores<'_>) -> Result<Tensor>| {
            let scores =
                Var::from_tensor(&noise(1, &[2, 3, 4, 9], DType::F32)).expect("a variable");
            let how = Scores { cap: Some(1.5), mask: Mask::Additive(&mask), ..HALF };
            let shares = softmax(&scores, &how).expect("shares");
            let loss = (shares * &weights).and_then(|weighted| weighted.sum_all());
            let gradients = loss.and_then(|loss| loss.backward()).expect("a backward");
            gradients.get(&scores).expect("a gradient").clone()
        };
        let [got, want] = [nn::softmax_of_scores, composed::softmax_of_scores].map(gradient);
        assert_near(&got, &want, &format!("the gradient under a mask {shape:?}"));
    }
}

#[test]
fn a_causal_mask_is_the_additive_one_and_later_queries_see_earlier_keys() {
    let scores = noise(1, &[2, 2, 5], DType::F32);
    let no = f32::NEG_INFINITY;
    let mask = Tensor::new(&[[0.0, 0.0, 0.0, 0.0, no], [0.0; 5]], &Device::Cpu).expect("a mask");
    let shares = |mask| nn::softmax_of_scores(&scores, &Scores { mask, ..HALF }).expect("shares");
    let causal = shares(Mask::Causal);
    assert_eq!(flat(&shares(Mask::Additive(&mask))), flat(&causal));
    assert_eq!(flat(&causal)[4], 0.0, "the first query does not see the last key");
}

#[test]
fn a_row_without_keys_is_nan_and_so_is_a_row_with_nan() {
    let no = f32::NEG_INFINITY;
    let rows = [[no, no, no], [1.0, f32::NAN, 0.0], [1.0, 2.0, no]];
    let shares = nn::softmax(&Tensor::new(&rows, &Device::Cpu).expect("rows")).expect("shares");
    let shares = flat(&shares);
    assert!(shares[..6].iter().all(|share| share.is_nan()), "{shares:?}");
    assert_eq!(shares[8], 0.0);
}

#[test]
fn labels_of_all_kinds() {
    let logits = Var::from_tensor(&noise(1, &[2, 7, 5], DType::F32)).expect("a variable");
    let some = labels(14, 5).reshape((2, 7)).expect("two dims");
    let none = (some.zeros_like().expect("zeros") + f64::from(-100)).expect("all ignored");
    let all = some.zeros_like().and_then(|zeros| zeros.to_dtype(DType::U32)).expect("u32");
    for (labels, count) in [(some, 12), (none, 0), (all, 14)] {
        let loss = nn::cross_entropy(&logits, &labels, IGNORED).expect("a loss");
        let want = composed::cross_entropy(&logits, &labels, IGNORED).expect("a loss");
        assert_eq!((loss.count, want.count), (count, count));
        assert_near(&loss.sum, &want.sum, "the sum");
        let gradients = loss.sum.backward().expect("a backward");
        let of_logits = flat(gradients.get(&logits).expect("a gradient"));
        let counts = flat(&labels).into_iter().map(|label| label >= 0.0);
        for (row, counts) in of_logits.chunks(5).zip(counts) {
            assert!(row.iter().sum::<f32>().abs() < 1e-6, "the gradient of shares has sum 0");
            assert_eq!(row.iter().any(|g| *g != 0.0), counts);
        }
        let mean = loss.mean().expect("a mean").to_scalar::<f32>().expect("a scalar");
        assert_eq!(mean.is_nan(), count == 0, "the mean over no items");
    }
}

#[test]
fn an_item_that_does_not_count_may_have_any_logits() {
    let logits = [[f32::NAN, f32::INFINITY], [0.0, 0.0]];
    let logits = Var::new(&logits, &Device::Cpu).expect("a variable");
    let labels = Tensor::new(&[7_i64, 1], &Device::Cpu).expect("labels");
    let loss = nn::cross_entropy(&logits, &labels, 7).expect("7 is ignored");
    let gradients = loss.sum.backward().expect("a backward");
    assert_eq!(flat(gradients.get(&logits).expect("a gradient")), [0.0, 0.0, 0.5, -0.5]);
}

/// candle would keep a gradient that nobody wants.
#[test]
fn frozen_inputs_get_no_gradient_and_tracked_ones_do() {
    for layer in LAYERS.iter().filter(|layer| layer.tracked > 1) {
        let (inputs, _) = layer.large(DType::F32);
        let var = Var::from_tensor(&inputs[1]).expect("a variable");
        let mut given = inputs.clone();
        given[1] = var.as_tensor().clone();
        let output = (layer.fused)(&given).expect("a forward");
        let gradients = output.backward().expect("a backward");
        assert!(gradients.get(&var).is_some(), "{}", layer.name);
        assert!(gradients.get(&inputs[0]).is_none(), "{}", layer.name);
    }
}

/// Norms in bf16 often have weights in f32.
#[test]
fn a_weight_may_have_another_dtype() {
    let x = noise(1, &[3, 8], DType::BF16);
    let weight = Var::from_tensor(&noise(2, &[4, 8], DType::F32)).expect("a variable");
    let y = nn::linear(&x, &weight, None).expect("a forward");
    assert_eq!(y.dtype(), DType::BF16);
    let gradients = y.backward().expect("a backward");
    assert_eq!(gradients.get(&weight).expect("a gradient").dtype(), DType::F32);
    let x = noise(1, &[3, 8], DType::BF16);
    let weight = Var::from_tensor(&noise(2, &[8], DType::F32)).expect("a variable");
    let bias = Var::from_tensor(&noise(3, &[8], DType::F16)).expect("a variable");
    let y = nn::layer_norm(&x, &weight, &bias, EPS).expect("a forward");
    assert_eq!(y.dtype(), DType::BF16);
    let gradients = y.backward().expect("a backward");
    for (var, dtype) in [(&weight, DType::F32), (&bias, DType::F16)] {
        assert_eq!(gradients.get(var).expect("a gradient").dtype(), dtype);
    }
}

/// The scores are not in memory as a whole; here they are.
#[test]
fn attention_is_the_softmax_of_scores_with_all_masks_and_any_lengths() {
    let dims = |length, heads| [2, length, heads, 8];
    let windows = [1, 7, 65, 100].map(Mask::Window);
    for (queries, keys) in [(1, 1), (1, 9), (70, 70), (65, 130), (130, 140)] {
        let q = noise(1, &dims(queries, 6), DType::F32);
        let [k, v] = [2, 3].map(|seed| noise(seed, &dims(keys, 3), DType::F32));
        let added = noise(4, &[6, 1, keys], DType::F32);
        let masks = [Mask::None, Mask::Causal, Mask::Additive(&added)].into_iter().chain(windows);
        for scores in
            masks.flat_map(|mask| [None, Some(3.0)].map(|cap| Scores { scale: 0.3, cap, mask }))
        {
            let vars = [&q, &k, &v].map(|x| Var::from_tensor(x).expect("a variable"));
            let inputs = vars.each_ref().map(Var::as_tensor);
            let fused = nn::attention(inputs, &scores).expect("a forward");
            let composed = composed::attention(inputs, &scores).expect("a forward");
            let what = format!("{queries} queries, {keys} keys, {scores:?}");
            assert_near(&fused, &composed, &what);
            let gradients = [&fused, &composed].map(|output| {
                (output.sqr().and_then(|squares| squares.backward())).expect("a backward")
            });
            for var in &vars {
                let [got, want] = gradients.each_ref().map(|all| all.get(var).expect("tracked"));
                assert_near(got, want, &what);
            }
        }
    }
}

/// Returns queries, keys and values of more than one block.
fn long_inputs(dtype: DType) -> [Var; 3] {
    let dims = [(130, 6), (140, 3), (140, 3)].map(|(length, heads)| [2, length, heads, 8]);
    let input = |seed| noise(seed, &dims[seed], dtype);
    [0, 1, 2].map(|seed| Var::from_tensor(&input(seed)).expect("a variable"))
}

/// Returns the output of attention, and the gradients of `q`, `k` and `v` from those of its
/// squares.
fn attended(vars: &[Var; 3], scores: &Scores<'_>) -> Vec<Tensor> {
    let output = nn::attention(vars.each_ref().map(Var::as_tensor), scores).expect("a forward");
    let gradients = gradients_of_squares(&output, &vars.each_ref());
    std::iter::once(output).chain(gradients).collect()
}

#[test]
fn a_window_as_long_as_the_keys_is_a_causal_mask_bit_by_bit() {
    let vars = long_inputs(DType::F32);
    let products = noise(1, &[2, 70, 75], DType::F32);
    for cap in [None, Some(2.0)] {
        let with = |mask| Scores { cap, mask, ..HALF };
        let causal = bits(&attended(&vars, &with(Mask::Causal)));
        let shares = |mask| flat(&nn::softmax_of_scores(&products, &with(mask)).expect("shares"));
        for window in [140, 141, usize::MAX] {
            assert_eq!(bits(&attended(&vars, &with(Mask::Window(window)))), causal);
            assert_eq!(shares(Mask::Window(window)), shares(Mask::Causal));
        }
        assert_ne!(bits(&attended(&vars, &with(Mask::Window(139)))), causal);
        assert_ne!(shares(Mask::Window(74)), shares(Mask::Causal));
    }
}

#[test]
fn with_a_window_of_one_a_query_sees_its_own_place() {
    [DType::F32, DType::BF16].into_iter().for_each(check_window_of_one);
}

fn check_window_of_one(dtype: DType) {
    let vars = long_inputs(dtype);
    let attended = attended(&vars, &Scores { mask: Mask::Window(1), ..HALF });
    let own = vars[2].narrow(1, 10, 130).and_then(|v| {
        let repeated = v.unsqueeze(3)?.broadcast_as((2, 130, 3, 2, 8))?;
        repeated.reshape((2, 130, 6, 8))
    });
    assert_eq!(flat(&attended[0]), flat(&own.expect("values")));
    for of_products in &attended[1..3] {
        assert!(flat(of_products).iter().all(|g| *g == 0.0), "one key has the share 1");
    }
    // Each value is the output of two heads.
    let of_v = flat(&attended[3].narrow(1, 10, 130).expect("seen values"));
    let v = flat(&vars[2].narrow(1, 10, 130).expect("seen values"));
    assert_eq!(of_v, v.iter().map(|v| 4.0 * v).collect::<Vec<_>>());
    let unseen = flat(&attended[3].narrow(1, 0, 10).expect("the first values"));
    assert!(unseen.iter().all(|g| *g == 0.0));
}

/// A product with a key that is not a number would spoil a whole block, even with the share 0.
#[test]
fn keys_before_the_window_of_a_block_are_not_read() {
    let [q, k, v] = long_inputs(DType::F32);
    let spoiled = [k, v].map(|input| {
        let rest = input.narrow(1, 60, 80).expect("later keys");
        let first = (input.narrow(1, 0, 60)).and_then(|first| first * f64::NAN);
        let whole = Tensor::cat(&[first.expect("no numbers"), rest], 1).expect("joined");
        Var::from_tensor(&whole).expect("a variable")
    });
    let [k, v] = spoiled;
    for cap in [None, Some(2.0)] {
        // The first query of the second block is at place 74.
        let scores = Scores { cap, mask: Mask::Window(15), ..HALF };
        let attended = attended(&[q.clone(), k.clone(), v.clone()], &scores);
        for of_queries in &attended[..2] {
            let later = flat(&of_queries.narrow(1, 64, 66).expect("later blocks"));
            assert!(later.iter().all(|x| x.is_finite()));
            let first = flat(&of_queries.narrow(1, 0, 64).expect("the first block"));
            assert!(first.iter().any(|x| x.is_nan()));
        }
    }
}

/// Returns the gradients of variables, from the sum of the squares of a result.
fn gradients_of_squares(result: &Tensor, vars: &[&Var]) -> Vec<Tensor> {
    let gradients = result.sqr().and_then(|squares| squares.backward()).expect("a backward");
    vars.iter().map(|var| gradients.get(var).expect("a gradient").clone()).collect()
}

#[test]
fn products_of_nothing_are_zeros() {
    [DType::F32, DType::BF16].into_iter().for_each(check_products_of_nothing);
}

fn check_products_of_nothing(dtype: DType) {
    let var = |dims: &[usize]| Var::from_tensor(&noise(1, dims, dtype)).expect("a variable");
    for (x, weight) in [([2, 0, 4], [3, 4]), ([2, 5, 4], [0, 4]), ([2, 5, 0], [3, 0])] {
        let x = var(&x);
        let weight = var(&weight);
        let y = nn::linear(&x, &weight, None).expect("a forward");
        assert_eq!(y.dims(), [x.dims()[0], x.dims()[1], weight.dims()[0]]);
        let gradients = gradients_of_squares(&y, &[&x, &weight]);
        assert!(gradients.iter().all(|gradient| flat(gradient).iter().all(|g| *g == 0.0)));
    }
    for (queries, keys) in
        [([0, 5, 2, 8], [0, 5, 2, 8]), ([2, 0, 2, 8], [2, 0, 2, 8]), ([2, 5, 2, 8], [2, 0, 2, 8])]
    {
        let q = var(&queries);
        let kv = var(&keys);
        let mixed = nn::attention([&q, &kv, &kv], &ALL).expect("a forward");
        assert_eq!(mixed.dims(), queries);
        assert!(flat(&mixed).iter().all(|x| *x == 0.0));
        let gradients = gradients_of_squares(&mixed, &[&q, &kv]);
        assert!(gradients.iter().all(|gradient| flat(gradient).iter().all(|g| *g == 0.0)));
    }
    let nothing = noise(1, &[2, 0, 3, 2, 8], dtype);
    for mask in [Mask::Causal, Mask::Window(3)] {
        let scores = Scores { cap: Some(1.0), mask, ..ALL };
        let mixed = nn::attention_packed(&nothing, &scores).expect("a forward");
        assert_eq!(mixed.dims(), [2, 0, 2, 8]);
    }
}

type Attention = fn([&Tensor; 3], &Scores<'_>) -> Result<Tensor>;

/// Padding, for which PyTorch's attention gives 0, too.
#[test]
fn a_query_without_keys_has_the_output_zero_and_spoils_no_gradient() {
    let mask = Tensor::new(&[[0.0_f32, f32::NEG_INFINITY], [f32::NEG_INFINITY; 2]], &Device::Cpu);
    let mask = mask.expect("a mask");
    for (attention, dtype) in [
        (nn::attention as Attention, DType::F32),
        (nn::attention, DType::BF16),
        (composed::attention, DType::F32),
    ] {
        let x = Var::from_tensor(&noise(3, &[1, 2, 1, 4], dtype)).expect("a variable");
        let how = Scores { cap: Some(1.5), mask: Mask::Additive(&mask), ..HALF };
        let mixed = attention([&x, &x, &x], &how).expect("a forward");
        let values = flat(&x);
        assert_eq!(flat(&mixed), [&values[..4], &[0.0; 4]].concat());
        let gradient = flat(&gradients_of_squares(&mixed, &[&x])[0]);
        let twice: Vec<f32> = values[..4].iter().map(|x| 2.0 * x).chain([0.0; 4]).collect();
        assert_near(
            &Tensor::new(gradient, &Device::Cpu).expect("a list"),
            &Tensor::new(twice, &Device::Cpu).expect("a list"),
            "x",
        );
    }
}

#[test]
fn views_are_read_and_one_tensor_may_be_all_inputs() {
    let base = Var::from_tensor(&noise(5, &[2, 2, 9, 4], DType::F32)).expect("a variable");
    let view = base.transpose(1, 2).expect("a view");
    let three = [&view, &view, &view];
    let causal = Scores { mask: Mask::Causal, ..HALF };
    let fused = nn::attention(three, &causal).expect("a forward");
    let composed = composed::attention(three, &causal).expect("a forward");
    assert_near(&fused, &composed, "attention");
    let of = |y: &Tensor| gradients_of_squares(y, &[&base]).remove(0);
    assert_near(&of(&fused), &of(&composed), "attention");
    let square = Var::from_tensor(&noise(6, &[5, 5], DType::F32)).expect("a variable");
    let turned = square.t().expect("a view");
    let bias = turned.get(2).expect("a view");
    let fused = nn::linear(&square, &turned, Some(&bias)).expect("a forward");
    let composed = composed::linear(&square, &turned, Some(&bias)).expect("a forward");
    assert_near(&fused, &composed, "linear");
    let of = |y: &Tensor| gradients_of_squares(y, &[&square]).remove(0);
    assert_near(&of(&fused), &of(&composed), "linear");
    let one = square.sum_keepdim(0).and_then(|sum| sum.broadcast_as((3, 5))).expect("a view");
    let fused = nn::linear(&one, &square, None).expect("a forward");
    assert_near(&fused, &composed::linear(&one, &square, None).expect("a forward"), "broadcast");
}
