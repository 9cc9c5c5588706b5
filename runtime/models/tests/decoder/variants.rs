//! Models of other kinds than the golden ones, which the tests make, against stock candle on whole
//! parameters.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use hsdp::{Mesh, Phase, Plan, UnitId};
use hsdp_models::decoder::{Decoder, DecoderConfig, Lora, Recomputation};
use hsdp_sharding::{Gather, PlanOptions};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::batches::{Batches, golden};
use crate::run::{Numbers, Recipe, Run, decoder};
use crate::stock::{Arithmetic, Stock};

const STEPS: usize = 4;

/// The `config.json` of a small model, with changes.
fn config(changes: &Value) -> Value {
    let mut config = json!({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "initializer_range": 0.1
    });
    for (name, value) in changes.as_object().expect("an object") {
        config[name] = value.clone();
    }
    config
}

#[test]
fn a_config_that_was_changed_to_contradict_itself_is_refused() {
    let mut changed = DecoderConfig::from_json(&config(&json!({})).to_string()).expect("a model");
    changed.num_hidden_layers += 1;
    let expected = "num_hidden_layers is 3: it must be from 1 to 10000, and the number of layers";
    let decoder = Decoder::new(changed);
    for error in [
        decoder.recorded().map(drop).expect_err("a layer is missing").to_string(),
        decoder.spec().map(drop).expect_err("a layer is missing").to_string(),
    ] {
        assert!(error.contains(expected), "{error}");
    }
}

/// How the tensors of a folder are written.
#[derive(Clone, Copy)]
enum Written {
    /// In one file, in this dtype.
    Whole(DType),
    /// In several files with an index, in this dtype.
    Spread(DType),
}

/// Writes a model of random weights as a folder.
fn write(folder: &Path, config: &Value, written: Written) {
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
    let llama = Decoder::new(DecoderConfig::from_json(&config.to_string()).expect("a model"));
    let init = llama.recorded().expect("a model").init(3);
    let (Written::Whole(dtype) | Written::Spread(dtype)) = written;
    let tensor = |param: &hsdp::Param| {
        let values = Tensor::from_vec(init(param), param.shape.as_slice(), &Device::Cpu);
        (param.name.clone(), values.and_then(|it| it.to_dtype(dtype)).expect("values"))
    };
    let spec = llama.spec().expect("a model");
    let tensors: Vec<_> = spec.params().map(|(_, param)| param).map(tensor).collect();
    match written {
        Written::Whole(_) => {
            let all: HashMap<_, _> = tensors.into_iter().collect();
            safetensors::save(&all, folder.join("model.safetensors")).expect("written");
        }
        Written::Spread(_) => spread(folder, tensors),
    }
}

fn spread(folder: &Path, tensors: Vec<(String, Tensor)>) {
    let mut files = json!({});
    for (index, part) in tensors.chunks(5).enumerate() {
        let file = format!("model-{index:05}.safetensors");
        part.iter().for_each(|(name, _)| files[name] = json!(file));
        let part: HashMap<_, _> = part.iter().cloned().collect();
        safetensors::save(&part, folder.join(file)).expect("written");
    }
    let index = json!({ "metadata": {}, "weight_map": files }).to_string();
    std::fs::write(folder.join("model.safetensors.index.json"), index).expect("written");
}

#[track_caller]
pub(crate) fn close(got: &Numbers, want: &Numbers) {
    let within = |what: &str, got: &[f64], want: &[f64], relative: f64| {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= relative * want.abs(), "{what}: {got}, not {want}");
        }
    };
    within("losses", &got.losses, &want.losses, 2e-5);
    within("norms", &got.norms, &want.norms, 1e-4);
    within("held-out losses", &got.held_out, &want.held_out, 2e-5);
    for (name, want) in &want.first {
        // In a first step the matrices A of adapters have no gradient, because B is 0.
        assert!((got.first[name] - want).abs() <= 1e-4 * want, "{name}: {}", got.first[name]);
    }
}

/// Trains sharded and unsharded. Returns the sharded numbers.
fn compare(model: Decoder, folder: &Path, mesh: &str, microbatches: usize) -> Numbers {
    compare_on(&Batches::read(&golden("padded")), model, folder, mesh, microbatches)
}

fn compare_on(
    batches: &Batches,
    model: Decoder,
    folder: &Path,
    mesh: &str,
    microbatches: usize,
) -> Numbers {
    let want = Stock::read(&model, folder, Arithmetic::Stock).train(batches, STEPS);
    let run = |decoder: Decoder| Run {
        decoder,
        model: folder.to_owned(),
        mesh: mesh.parse::<Mesh>().expect("a mesh"),
        microbatches,
        steps: STEPS,
        recipe: Recipe::AdamW,
    };
    let got = run(model.clone()).numbers(batches);
    close(&got, &want);
    let recomputed = run(model.recomputing(Recomputation::Blocks)).numbers(batches);
    assert_eq!(recomputed, got);
    got
}

fn check(changes: &Value, written: Written, mesh: &str, microbatches: usize) {
    let folder = TempDir::new().expect("a folder");
    write(folder.path(), &config(changes), written);
    let Numbers { losses, .. } = compare(decoder(folder.path()), folder.path(), mesh, microbatches);
    assert!(losses[STEPS - 1] < losses[0], "it learns: {losses:?}");
}

#[test]
fn tied_embeddings_and_as_many_heads_for_keys() {
    let changes = json!({ "tie_word_embeddings": true, "num_key_value_heads": 4 });
    check(&changes, Written::Whole(DType::F32), "2x2", 1);
}

#[test]
fn bf16_in_several_files_another_theta_and_one_head_for_keys() {
    let changes =
        json!({ "rope_parameters": { "rope_theta": 500_000.0 }, "num_key_value_heads": 1 });
    check(&changes, Written::Spread(DType::BF16), "2x3", 2);
}

#[test]
fn f16_and_heads_of_another_width() {
    let changes = json!({ "head_dim": 6, "rope_theta": 100.0 });
    check(&changes, Written::Whole(DType::F16), "4x1", 1);
}

#[test]
fn a_rank_without_a_label_that_counts_has_weight_0() {
    let folder = TempDir::new().expect("a folder");
    write(folder.path(), &config(&json!({})), Written::Whole(DType::F32));
    let mut batches = Batches::read(&golden("padded"));
    // The labels of rank 1 of four, in all steps and in the evaluations.
    for labels in [&mut batches.training[1], &mut batches.held_out[1]] {
        let dim = labels.rank() - 2;
        let none = labels.narrow(dim, 6, 6).and_then(|it| it.zeros_like()? - 100.0);
        let parts = [labels.narrow(dim, 0, 6), none, labels.narrow(dim, 12, 12)];
        let parts: Result<Vec<_>, _> = parts.into_iter().collect();
        *labels = Tensor::cat(&parts.expect("24 sequences"), dim).expect("as before");
    }
    compare_on(&batches, decoder(folder.path()), folder.path(), "2x2", 2);
}

#[test]
fn adapters_train_and_the_rest_is_frozen() {
    for tie in [false, true] {
        let folder = TempDir::new().expect("a folder");
        let changes = json!({ "tie_word_embeddings": tie });
        write(folder.path(), &config(&changes), Written::Whole(DType::F32));
        let model = decoder(folder.path()).with_lora(Lora::of_rank(4));
        // No gradient reaches the embedding, unless the head reads it too.
        let plan = Plan::new(
            model.spec().expect("units"),
            Mesh::new(2, 2).expect("four ranks"),
            PlanOptions::default(),
        );
        let backward =
            |unit| move |gather: &&Gather| gather.unit == unit && gather.phase == Phase::Backward;
        let gathers = plan.expect("a plan").gathers().to_vec();
        assert_eq!(gathers.iter().filter(backward(UnitId::new(0))).count(), 0);
        assert_eq!(gathers.iter().filter(backward(UnitId::new(1))).count(), 1);
        let numbers = compare(model, folder.path(), "2x2", 1);
        let names: Vec<_> = numbers.first.keys().collect();
        assert_eq!(names.len(), 16, "{names:?}");
        assert!(names.iter().all(|name| name.contains("_proj.lora_")), "{names:?}");
        let [before, after] = numbers.held_out;
        assert!((before - after).abs() > 1e-3, "they are trained: {before} and {after}");
    }
}
