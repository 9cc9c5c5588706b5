//! A check before the first step finds the parameters that a loss does not reach.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder, linear, linear_no_bias, ops, rms_norm};
use hsdp::Param;
use hsdp_candle::{Error, LostGradients, record};

fn input() -> Tensor {
    Tensor::zeros((2, 4), DType::F32, &Device::Cpu).expect("zeros")
}

/// Asks for the parameters of `logits`.
fn load(vb: VarBuilder<'_>) -> Result<()> {
    for block in 0..2 {
        linear(4, 4, vb.pp(format!("h.{block}.mlp")))?;
    }
    vb.get_with_hints(4, "norm.weight", Init::Const(1.0))?;
    linear_no_bias(4, 3, vb.pp("head")).map(drop)
}

/// Two blocks and a head. `norm` is the norm before the head.
fn logits(
    vb: &VarBuilder<'_>,
    norm: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let mut x = input();
    for block in 0..2 {
        x = linear(4, 4, vb.pp(format!("h.{block}.mlp")))?.forward(&x)?;
    }
    let weight = vb.get_with_hints(4, "norm.weight", Init::Const(1.0))?;
    linear_no_bias(4, 3, vb.pp("head"))?.forward(&norm(&x, &weight)?)
}

fn fused(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    ops::rms_norm(x, weight, 1e-5)
}

fn slow(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    ops::rms_norm_slow(x, weight, 1e-5)
}

fn names(error: Error) -> Vec<String> {
    match error {
        Error::LostGradients(LostGradients::NoGradient { parameters, .. }) => parameters,
        other => panic!("{other}"),
    }
}

#[test]
fn a_loss_that_reaches_all_passes_on_zeros() {
    let recorded = record(load).expect("a model");
    recorded.check_backward(|vb| logits(&vb, slow)?.sum_all()).expect("all have a gradient");
    // Not a scalar, and in another dtype than the builder's.
    let in_bf16 =
        |vb: VarBuilder<'_>| logits(&vb.to_dtype(DType::F64), |x, _| x.to_dtype(DType::F64));
    let error = recorded.check_backward(in_bf16).expect_err("an f32 input and f64 weights");
    assert!(matches!(error, Error::Candle(_)), "{error}");
    recorded.check_backward(|vb| logits(&vb, slow)).expect("a loss of several elements");
}

#[test]
fn a_norm_without_a_backward_is_found_with_all_before_it() {
    let recorded = record(load).expect("a model");
    let error = recorded.check_backward(|vb| logits(&vb, fused)?.sum_all()).expect_err("a cut");
    let said = error.to_string();
    let want = "5 of 6 trainable parameters get no gradient from this loss: \
                h.{0,1}.mlp.{weight,bias}; norm.weight; likely causes: norm (1 such in all) is a \
                norm that cuts, with all before it, if it is candle_nn's: use \
                `hsdp_models::nn::rms_norm`; ";
    assert!(said.starts_with(want), "{said}");
    let lost = ["h.0.mlp.weight", "h.0.mlp.bias", "h.1.mlp.weight", "h.1.mlp.bias", "norm.weight"];
    assert_eq!(names(error), lost);
    // A layer of candle_nn, which is fused on contiguous input alone.
    let layer = |vb: VarBuilder<'_>| rms_norm(4, 1e-5, vb.pp("n"))?.forward(&input());
    let error = record(|vb| rms_norm(4, 1e-5, vb.pp("n")))
        .expect("a model")
        .check_backward(layer)
        .expect_err("a cut");
    assert_eq!(names(error), ["n.weight"]);
}

#[test]
fn frozen_parameters_need_no_gradient() {
    let freeze = |param: Param| if param.name == "head.weight" { param } else { param.frozen() };
    let recorded = record(load).expect("a model").map(freeze);
    recorded.check_backward(|vb| logits(&vb, fused)?.sum_all()).expect("the head has one");
    let unfreeze = |mut param: Param| {
        if param.name == "h.1.mlp.bias" {
            param = Param::new(param.name, param.shape);
        }
        param
    };
    let error = recorded.map(unfreeze).check_backward(|vb| logits(&vb, fused)?.sum_all());
    assert_eq!(names(error.expect_err("one is trained, and cut")), ["h.1.mlp.bias"]);
}

#[test]
fn detached_and_unused_parameters_are_found() {
    let detached = |vb: VarBuilder<'_>| {
        let x = linear_no_bias(4, 4, vb.pp("a"))?.forward(&input())?.detach();
        let x = linear_no_bias(4, 4, vb.pp("b"))?.forward(&x)?;
        linear_no_bias(4, 4, vb.pp("pooler"))?;
        Ok(x)
    };
    let recorded = record(detached).expect("a model");
    let error = recorded.check_backward(detached).expect_err("a cut");
    assert_eq!(names(error), ["a.weight", "pooler.weight"]);
    // The layers of `b` and `pooler` are not made at all.
    let first = |vb: VarBuilder<'_>| linear_no_bias(4, 4, vb.pp("a"))?.forward(&input());
    let error = recorded.check_backward(first).expect_err("two have no part");
    let said = error.to_string();
    assert!(
        said.contains("the loss did not make the layers of b.weight; pooler.weight;"),
        "{said}"
    );
    assert_eq!(names(error), ["b.weight", "pooler.weight"]);
    // Values that an op of candle rounds.
    let rounded = |vb: VarBuilder<'_>| linear_no_bias(4, 4, vb.pp("a"))?.forward(&input())?.round();
    let error = record(rounded).expect("a model").check_backward(rounded).expect_err("a cut");
    assert_eq!(names(error), ["a.weight"]);
}

#[test]
fn a_tied_parameter_needs_one_path() {
    let tied = |vb: VarBuilder<'_>| {
        let x = linear_no_bias(4, 4, vb.pp("a"))?.forward(&input())?;
        linear_no_bias(4, 4, vb.pp("a"))?.forward(&x.detach())
    };
    record(tied).expect("a model").check_backward(tied).expect("by its second use");
}

/// An op that candle tracks and cannot differentiate has candle's own error.
#[test]
fn candles_error_of_the_backward_is_kept() {
    let pooled = |vb: VarBuilder<'_>| {
        let x = vb.get((1, 1, 4, 4), "image")?;
        x.max_pool2d_with_stride(2, 1)
    };
    let error = record(pooled).expect("a model").check_backward(pooled).expect_err("no backward");
    let said = error.to_string();
    assert!(said.contains("backward of the check"), "{said}");
    assert!(said.contains("backward not supported for maxpool2d"), "{said}");
}

#[test]
fn tensors_that_were_not_recorded_are_refused() {
    let recorded = record(|vb| linear(4, 4, vb.pp("a"))).expect("a model");
    let check = |loss: &dyn Fn(VarBuilder<'_>) -> Result<Tensor>| {
        recorded.check_backward(loss).expect_err("refused").to_string()
    };
    let said = check(&|vb| vb.get(4, "b.weight"));
    assert!(said.contains("b.weight") && said.contains("did not ask"), "{said}");
    let said = check(&|vb| vb.get(4, "a.weight"));
    assert_eq!(said, "parameter a.weight is asked for as [4, 4], and later as [4]");
    let integers = |vb: VarBuilder<'_>| {
        vb.get_with_hints_dtype((4, 4), "a.weight", Init::Const(0.0), DType::U32)
    };
    assert!(check(&integers).starts_with("a.weight (of u32) are buffers"));
    let error = recorded.check_backward(|vb| {
        candle_nn::batch_norm(4, 1e-5, vb.pp("bn"))?;
        Ok(input())
    });
    assert!(error.expect_err("not recorded").to_string().contains("bn.running_mean"));
    let own = recorded.check_backward(|_| candle_core::bail!("the model's own"));
    assert!(own.expect_err("the loss failed").to_string().contains("the model's own"));
}

#[test]
fn a_name_without_a_shape_is_the_same_parameter() {
    let twice = |vb: VarBuilder<'_>| vb.get(4, "w")? + vb.get_unchecked("w")?;
    let recorded = record(|vb| vb.get(4, "w")).expect("a model");
    recorded.check_backward(twice).expect("the same variable");
}
