//! Llamas whose units compute in dtypes of their own.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use hsdp::{
    DType as HsdpDType, Mesh, ModelOptions, Precision, ShardedModel, StepOptions, World,
    WorldOptions,
};
use hsdp_candle::{Error, Pass, Plain};
use hsdp_models::decoder::{Decoder, DecoderConfig};

type Named = BTreeMap<String, Vec<f32>>;

const CONFIG: &str = r#"{ "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2 }"#;

/// A Llama in bf16 whose last norm and head compute in f32.
#[test]
fn a_llama_with_a_head_in_f32_trains_as_it_does_unsharded() {
    let llama = Decoder::new(DecoderConfig::from_json(CONFIG).expect("sizes"));
    let llama = llama.compute_in("root", HsdpDType::F32);
    let spec = llama.spec().expect("units");
    let recorded = llama.recorded().expect("parameters");
    let tokens = Tensor::new(&[[3_u32, 1, 4, 1, 5]], &Device::Cpu).expect("ids");
    let labels = Tensor::new(&[[1_i64, 4, 1, 5, -100]], &Device::Cpu).expect("labels");
    let init = recorded.init(3);
    let all = spec.params().map(|(_, param)| (param.name.clone(), init(param))).collect();
    let precision = Precision::compute_in(HsdpDType::BF16);
    let plain = Plain::new(spec.clone(), &all, precision).expect("values for all");
    let logits = llama.logits(&plain, &tokens).expect("a forward");
    assert_eq!(logits.dtype(), DType::F32);
    let of_plain = llama.loss(&plain, &tokens, &labels).expect("a forward");
    let gradients = of_plain.sum.backward().expect("a backward");
    let of = |(name, variable): (&String, &Var)| {
        let gradient = gradients.get(variable).expect("a gradient").flatten_all()?;
        Ok((name.clone(), gradient.to_dtype(DType::F32)?.to_vec1()?))
    };
    let want: Result<Named> = plain.parameters().iter().map(of).collect();
    // Both ranks have the same sequence, so each sum is twice that of one.
    let want = want.expect("gradients");
    for got in hsdp::launch(2, WorldOptions::default(), |world| -> std::result::Result<_, Error> {
        let options =
            ModelOptions { precision, ..ModelOptions::on(Mesh::new(1, 2).expect("two ranks")) };
        let mut model = ShardedModel::new(world, spec.clone(), options, recorded.init(3))?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let pass = Pass::new(step.microbatch()?)?;
        let loss = llama.loss(&pass, &tokens, &labels)?;
        pass.backward_sum(&loss.sum, loss.count)?;
        Ok(step.finish()?.full(&model)?)
    }) {
        let got = got.expect("a step");
        for (name, want) in &want {
            for (got, want) in got[name].iter().zip(want) {
                let want = f64::from(*want) / of_plain.count as f64;
                let bound = 1e-2 * want.abs() + 1e-6;
                assert!((f64::from(*got) - want).abs() <= bound, "{name}: {got}, not {want}");
            }
        }
    }
}

/// The head of tied weights is the embedding, which is in bf16.
#[test]
fn a_tied_llama_with_a_head_in_f32_is_refused_by_name() {
    let tied = CONFIG.replace("\"hidden_size\"", "\"tie_word_embeddings\": true, \"hidden_size\"");
    let llama = Decoder::new(DecoderConfig::from_json(&tied).expect("sizes"));
    let llama = llama.compute_in("root", HsdpDType::F32);
    let tokens = Tensor::new(&[[3_u32, 1]], &Device::Cpu).expect("ids");
    let one = ModelOptions::on(Mesh::new(1, 1).expect("one rank"));
    let precision = Precision::compute_in(HsdpDType::BF16);
    let options = ModelOptions { precision, ..one };
    let init = llama.recorded().expect("parameters").init(3);
    let spec = llama.spec().expect("units");
    let mut model = ShardedModel::new(World::single(), spec, options, init).expect("a model");
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
    let error = llama.logits(&pass, &tokens).expect_err("it is refused");
    let expected =
        "parameter model.embed_tokens.weight of unit model.embed_tokens is asked for as F32";
    assert!(error.to_string().starts_with(expected), "{error}");
}
