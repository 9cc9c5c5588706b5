//! Layers refuse a parameter that was carried out of its unit, and so is not gathered.

use candle_core::{DType, Device, Result, Tensor};
use hsdp::{Mesh, ModelOptions, ModelSpec, Param, ShardedModel, StepOptions, Unit, World};
use hsdp_candle::{Error, Pass, UnitsExt};
use hsdp_models::nn::{self, Mask, Scores};

#[test]
fn every_layer_refuses_a_freed_parameter() {
    let unit =
        Unit::new("layer").param(Param::new("weight", [4, 4])).param(Param::new("bias", [4]));
    let options = ModelOptions::on(Mesh::new(1, 1).expect("one rank"));
    let spec = ModelSpec::new().unit(unit);
    let values = |param: &Param| vec![0.5; param.numel()];
    let mut model = ShardedModel::new(World::single(), spec, options, values).expect("a model");
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    let pass = Pass::new(step.microbatch().expect("the first")).expect("a pass");
    let whole = Tensor::ones((4, 4), DType::F32, &Device::Cpu).expect("ones");
    let mut carried = None;
    pass.unit("layer", &whole, |p, x| {
        let [weight, bias] = [p.get("weight")?, p.get("bias")?];
        for (what, attempt) in attempts(&whole, [&weight, &bias]) {
            assert!(attempt.is_ok(), "{what} of gathered parameters: {attempt:?}");
        }
        carried = Some([weight, bias]);
        Ok(x.clone())
    })
    .expect("a forward");
    let [weight, bias] = carried.expect("the unit ran");
    for (what, attempt) in attempts(&whole, [&weight, &bias]) {
        let error = attempt.err().unwrap_or_else(|| panic!("{what} was accepted"));
        let error = Error::from(error);
        assert!(matches!(error, Error::Resharded { .. }), "{what}: {error}");
    }
}

/// Calls each layer on `whole` and one parameter, at each place that takes a parameter.
fn attempts(whole: &Tensor, [freed, bias]: [&Tensor; 2]) -> Vec<(&'static str, Result<Tensor>)> {
    let ids = Tensor::new(&[1_u32, 3, 0, 2], &Device::Cpu).expect("ids");
    let row = whole.get(0).expect("a row");
    let angles = whole.narrow(1, 0, 2).and_then(|half| half.contiguous()).expect("angles");
    // One sequence of four tokens, with one head.
    let heads = |x: &Tensor| x.reshape((1, 4, 1, 4));
    let scores = Scores { scale: 0.5, cap: None, mask: Mask::Causal };
    let attention = |q: &Tensor, k: &Tensor, v: &Tensor| {
        nn::attention([&heads(q)?, &heads(k)?, &heads(v)?], &scores)
    };
    let loss = |logits: &Tensor| nn::cross_entropy(logits, &ids, nn::IGNORED)?.mean();
    vec![
        ("rms_norm, input", nn::rms_norm(freed, &row, 1e-5)),
        ("rms_norm, weight", nn::rms_norm(whole, bias, 1e-5)),
        ("layer_norm, input", nn::layer_norm(freed, &row, &row, 1e-5)),
        ("layer_norm, weight", nn::layer_norm(whole, bias, &row, 1e-5)),
        ("layer_norm, bias", nn::layer_norm(whole, &row, bias, 1e-5)),
        ("gelu", nn::gelu(freed)),
        ("silu_mul, gate", nn::silu_mul(freed, whole)),
        ("silu_mul, up", nn::silu_mul(whole, freed)),
        ("gelu_mul, gate", nn::gelu_mul(freed, whole)),
        ("gelu_mul, up", nn::gelu_mul(whole, freed)),
        ("linear, input", nn::linear(freed, whole, None)),
        ("linear, weight", nn::linear(whole, freed, None)),
        ("linear, bias", nn::linear(whole, whole, Some(bias))),
        ("embedding", nn::embedding(&ids, freed)),
        ("padded_embedding", nn::padded_embedding(&ids, freed, 0)),
        ("rope", heads(freed).and_then(|x| nn::rope(&x, &angles, &angles))),
        ("softmax", nn::softmax(freed)),
        ("soft_cap", nn::soft_cap(freed, 2.0)),
        ("attention, queries", attention(freed, whole, whole)),
        ("attention, keys", attention(whole, freed, whole)),
        ("attention, values", attention(whole, whole, freed)),
        ("cross_entropy", loss(freed)),
    ]
}
