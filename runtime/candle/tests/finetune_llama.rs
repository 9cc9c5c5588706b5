//! The example as a program: a folder of Hugging Face in, another out, and its refusals.

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::VarBuilder;
use candle_transformers::models::llama as stock;
use hsdp_candle::llama::{Llama, LlamaConfig};
use hsdp_candle::{Plain, Units};
use serde_json::{Value, json};
use tempfile::TempDir;

use common::example;

/// A golden folder.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_llama").join(name)
}

/// A folder for the files of a test, with a copy of a golden model and its batches.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(TempDir::new().expect("a folder"));
        fs::create_dir(place.path("model")).expect("a folder");
        for file in [
            "model/config.json",
            "model/model.safetensors",
            "model/generation_config.json",
            "batches.safetensors",
        ] {
            fs::copy(golden("plain").join(file), place.path(file)).expect("copied");
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs the program, in the arguments of which names in braces are paths in the folder.
    fn run(&self, arguments: &str) -> Output {
        let path = |word: &str| match word.strip_prefix('{').and_then(|it| it.strip_suffix('}')) {
            Some(name) => self.path(name).display().to_string(),
            None => word.to_owned(),
        };
        let arguments = arguments.split_whitespace().map(path);
        example("finetune_llama").args(arguments).output().expect("the program starts")
    }

    fn trained(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments}: {said}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// The line of a refusal, with exit code 2.
    fn refused(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments}: {said}");
        assert!(said.starts_with("finetune_llama: "), "{arguments}: {said}");
        assert!(output.stdout.is_empty(), "{arguments}");
        said
    }

    fn json(&self, name: &str) -> Value {
        let text = fs::read_to_string(self.path(name)).expect("a file");
        serde_json::from_str(&text).expect("JSON")
    }

    fn losses(&self, out: &str) -> Vec<f64> {
        let text = fs::read_to_string(self.path(out).join("metrics.jsonl")).expect("metrics");
        let line = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
        text.lines().map(|it| line(it)["loss"].as_f64().expect("a number")).collect()
    }

    /// Changes the file of batches.
    fn rewrite(&self, file: &str, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
        let path = self.path(file);
        let mut tensors = safetensors::load(&path, &Device::Cpu).expect("tensors");
        change(&mut tensors);
        safetensors::save(&tensors, &path).expect("written");
    }

    fn reconfigure(&self, field: &str, value: Value) {
        let mut config = self.json("model/config.json");
        config[field] = value;
        fs::write(self.path("model/config.json"), config.to_string()).expect("written");
    }
}

const TUNE: &str = "--model {model} --batches {batches.safetensors}";

#[test]
fn a_model_of_transformers_is_trained_and_exported() {
    let place = Place::new();
    let said = place.trained(&format!("{TUNE} --recompute --out {{out}} --export {{tuned}}"));
    assert!(
        said.contains("exactly as planned") && said.contains("activations, recomputed"),
        "{said}"
    );
    let expected: Value = serde_json::from_str(
        &fs::read_to_string(golden("plain/expected_adamw.json")).expect("a file"),
    )
    .expect("JSON");
    let losses = place.losses("out");
    for (step, want) in expected["losses"].as_array().expect("losses").iter().enumerate() {
        let want = want.as_f64().expect("a number");
        assert!((losses[step] - want).abs() <= 2e-5 * want, "{step}: {}, not {want}", losses[step]);
    }
    let summary = place.json("out/summary.json");
    for field in ["eval_loss_before", "eval_loss_after"] {
        let [got, want] = [&summary, &expected].map(|it| it[field].as_f64().expect("a number"));
        assert!((got - want).abs() <= 5e-5 * want, "{field}: {got}, not {want}");
    }
    for file in ["loss.svg", "trace.json", "run.lock"] {
        assert!(place.path("out").join(file).exists(), "{file}");
    }
    assert!(!place.path("out/warnings.jsonl").exists());
    let config = place.json("tuned/config.json");
    assert_eq!((&config["dtype"], &config["rope_theta"]), (&json!("float32"), &json!(10_000.0)));
    assert_eq!(
        place.json("tuned/generation_config.json"),
        place.json("model/generation_config.json")
    );
    same_logits(&place.path("tuned"), summary["eval_loss_after"].as_f64().expect("a number"));
}

/// Reads a folder by candle's own Llama and by ours, and compares the logits of held-out sequences, and our loss of them.
fn same_logits(folder: &Path, loss: f64) {
    let batches = safetensors::load(golden("plain/batches.safetensors"), &Device::Cpu);
    let batches = batches.expect("tensors");
    let [tokens, labels] = ["eval_input_ids", "eval_labels"].map(|name| &batches[name]);
    let text = fs::read_to_string(folder.join("config.json")).expect("a file");
    let weights =
        safetensors::load(folder.join("model.safetensors"), &Device::Cpu).expect("tensors");
    let ours = Llama::new(LlamaConfig::from_json(&text).expect("a model"));
    let values = weights.iter().map(|(name, it)| {
        (name.clone(), it.flatten_all().and_then(|it| it.to_vec1()).expect("f32"))
    });
    let spec = ours.spec().expect("a model");
    let plain = Plain::new(spec, &values.collect(), hsdp::Precision::default()).expect("values");
    let plain: &dyn Units = &plain;
    let mean = ours.loss(plain, tokens, labels).and_then(|it| it.mean()?.to_scalar::<f32>());
    assert!((f64::from(mean.expect("a loss")) - loss).abs() < 1e-5 * loss);
    let last = ours.logits(plain, tokens).and_then(|it| it.get_on_dim(1, 31)?.to_vec2::<f32>());

    let config: stock::LlamaConfig = serde_json::from_str(&text).expect("candle reads it");
    let config = config.into_config(false);
    let builder = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let theirs = stock::Llama::load(builder, &config).expect("candle loads it");
    let mut cache = stock::Cache::new(false, DType::F32, &config, &Device::Cpu).expect("a cache");
    let logits = theirs.forward(tokens, 0, &mut cache).and_then(|it| it.to_vec2::<f32>());
    let pairs = last.expect("logits").concat().into_iter().zip(logits.expect("logits").concat());
    for (ours, theirs) in pairs {
        assert!((ours - theirs).abs() <= 1e-5 * theirs.abs().max(1.0), "{ours}, not {theirs}");
    }
}

#[test]
fn adapters_are_exported_beside_the_model_as_it_was() {
    let place = Place::new();
    let said = place.trained(&format!("{TUNE} --lora 4 --steps 3 --export {{tuned}}"));
    assert!(said.contains("adapters.safetensors, and not merged into model.safetensors"), "{said}");
    let read = |file: &str| safetensors::load(place.path(file), &Device::Cpu).expect("tensors");
    let [before, after] = ["model/model.safetensors", "tuned/model.safetensors"].map(read);
    let values = |it: &Tensor| it.flatten_all().and_then(|it| it.to_vec1::<f32>()).expect("f32");
    assert_eq!(before.len(), after.len());
    before.iter().for_each(|(name, it)| assert_eq!(values(it), values(&after[name]), "{name}"));
    let adapters = read("tuned/adapters.safetensors");
    assert_eq!(adapters.len(), 2 * 4 * 2);
    let trained = &adapters["model.layers.1.self_attn.k_proj.lora_B.weight"];
    assert_eq!(trained.dims(), [32, 4]);
    assert!(values(trained).iter().any(|value| *value != 0.0));
}

#[test]
fn a_run_that_is_resumed_on_another_mesh_goes_on_where_it_was() {
    let place = Place::new();
    let run = |out: &str, options: &str| {
        place.trained(&format!("{TUNE} --save-every 2 --out {{{out}}} {options}"));
        place.losses(out)
    };
    let whole = run("whole", "--steps 5");
    assert_eq!(run("out", "--steps 3"), whole[..3]);
    let resumed = run("out", "--steps 5 --mesh 1x2 --resume");
    for (resumed, whole) in resumed.iter().zip(&whole) {
        assert!((resumed - whole).abs() <= 1e-6 * whole, "{resumed}, not {whole}");
    }
    assert_eq!(resumed.len(), 5);
    assert_eq!(
        place.trained(&format!("{TUNE} --steps 5 --save-every 2 --out {{out}} --resume")),
        "all 5 steps are made\n"
    );
    let other =
        place.refused(&format!("{TUNE} --seed 2 --steps 6 --save-every 2 --out {{out}} --resume"));
    assert!(other.contains("was made with seed 1, this run has 2"), "{other}");
}

#[test]
fn adapters_are_resumed_without_a_copy_of_the_model() {
    let place = Place::new();
    let run = |out: &str, options: &str| {
        let tune = format!("{TUNE} --lora 4 --save-every 2 --out {{{out}}}");
        place.trained(&format!("{tune} {options}"));
        place.losses(out)
    };
    let whole = run("whole", "--steps 5");
    run("out", "--steps 3");
    assert_eq!(run("out", "--steps 5 --resume"), whole);
    let files = fs::read_dir(place.path("out/checkpoints/step-00000005")).expect("a checkpoint");
    let bytes: u64 = files.map(|it| it.expect("there").metadata().expect("a file").len()).sum();
    // 98624 elements are frozen, and 5120 are trained.
    assert!(bytes < 4 * 98_624, "{bytes} bytes");
}

/// A tokenizer of words, of which two are not in the text.
fn write_tokenizer(path: &Path) {
    let words = ["[UNK]", "she", "sells", "sea", "shells", "by", "the", "shore", "never", "seen"];
    let vocab: serde_json::Map<_, _> =
        words.iter().zip(0..).map(|(word, id)| ((*word).to_owned(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "truncation": null, "padding": null,
        "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" }
    });
    fs::write(path, tokenizer.to_string()).expect("written");
}

#[test]
fn a_text_is_read_by_the_tokenizer_of_the_folder_or_as_characters() {
    let place = Place::new();
    fs::write(place.path("text"), "she sells sea shells by the sea shore ".repeat(40))
        .expect("written");
    write_tokenizer(&place.path("model/tokenizer.json"));
    let small = "--data {text} --context 8 --batch 1 --steps 6 --mesh 1x2 --lr 0.01";
    place.trained(&format!("--model {{model}} {small} --out {{out}} --export {{tuned}}"));
    let losses = place.losses("out");
    assert!(losses[5] < losses[0] - 0.5, "it learns: {losses:?}");
    let summary = place.json("out/summary.json");
    assert!(
        summary["eval_loss_after"].as_f64() < summary["eval_loss_before"].as_f64(),
        "{summary}"
    );
    assert_eq!(place.json("tuned/tokenizer.json"), place.json("model/tokenizer.json"));
    // A model with random weights, of the characters of the text.
    place.trained(&format!("{small} --out {{out}} --export {{new}}"));
    assert_eq!(place.json("new/config.json")["vocab_size"], 11);
    let losses = place.losses("out");
    assert!((losses[0] - 11_f64.ln()).abs() < 0.1 && losses[5] < losses[0], "{losses:?}");
}

#[test]
fn sixteen_bits_train_too() {
    let place = Place::new();
    place.trained(&format!("{TUNE} --steps 4 --out {{f32}}"));
    place.trained(&format!("{TUNE} --steps 4 --param-dtype bf16 --out {{bf16}}"));
    for (got, want) in place.losses("bf16").iter().zip(place.losses("f32")) {
        assert!((got - want).abs() <= 0.01 * want && *got != want, "{got}, not about {want}");
    }
}

/// Bytes of the shards of rank 0, as planned and as measured.
fn shard_bytes(summary: &Value) -> [u64; 2] {
    let shard = &summary["ranks"][0]["peak_memory_bytes"]["shard"];
    ["planned", "measured"].map(|side| shard[side].as_u64().expect("bytes"))
}

#[test]
fn a_frozen_model_of_16_bits_has_no_other_copy() {
    let place = Place::new();
    let tune = format!("{TUNE} --lora 4 --param-dtype bf16 --steps 2");
    place.trained(&format!("{tune} --out {{alone}}"));
    place.trained(&format!("{tune} --out {{whole}} --export {{tuned}}"));
    assert_eq!(place.losses("alone"), place.losses("whole"));
    let [alone, whole] =
        ["alone/summary.json", "whole/summary.json"].map(|it| shard_bytes(&place.json(it)));
    assert_eq!(alone[0], alone[1]);
    assert!(alone[0] * 10 < whole[0], "{alone:?} beside {whole:?}");
}

#[test]
fn bad_command_lines_are_one_line() {
    let place = Place::new();
    for (arguments, said) in [
        ("--model {model}", "--model needs --batches or --data"),
        ("--batches {batches.safetensors}", "--model"),
        ("--model {nothing} --batches {batches.safetensors}", "nothing/config.json: No such file"),
        ("--model {model} --batches {nothing}", "nothing: No such file"),
        ("--model {model} --batches {model}", "it is a directory"),
        ("--model {model} --batches {model/config.json}", "config.json: "),
        (
            "--model {model} --data {batches.safetensors}",
            "has no tokenizer.json, which --data needs",
        ),
        ("--lr 0", "invalid value '0' for '--lr"),
        ("--lora 0", "invalid value '0' for '--lora"),
        ("--data /dev/zero", "it is a device"),
        ("--context 100000000", "from 1 to 16777216"),
        ("--save-every 1", "--out"),
    ] {
        let line = place.refused(arguments);
        assert!(line.contains(said), "{arguments}: {line}");
    }
    for (arguments, said) in [
        ("--mesh 1x5", "a step of 24 sequences cannot be dealt to 5 ranks x 2 microbatches"),
        ("--microbatches 9", "cannot be dealt to 4 ranks x 9 microbatches"),
        ("--steps 13", "--steps 13: the file of --batches has 12"),
        ("--export {model}", "it is the folder of --model"),
        ("--data {model/config.json}", "--data"),
        ("--out {batches.safetensors}", "cannot write to"),
    ] {
        let line = place.refused(&format!("{TUNE} {arguments}"));
        assert!(line.contains(said), "{arguments}: {line}");
    }
}

#[test]
fn bad_batches_are_one_line() {
    let new = |shape: &[usize], value: i64, dtype| {
        let tensor = Tensor::full(value, shape, &Device::Cpu).and_then(|it| it.to_dtype(dtype));
        tensor.expect("a tensor")
    };
    let (ids, labels) = ("input_ids", "labels");
    for (name, tensor, said) in [
        (ids, None, "there is no tensor input_ids"),
        (labels, None, "there is no tensor labels"),
        ("eval_labels", None, "there is no tensor eval_labels"),
        (ids, Some(new(&[12, 24, 32], 1, DType::I64)), "input_ids is I64, not U32"),
        (labels, Some(new(&[12, 24, 32], 1, DType::F32)), "labels is F32, not I64"),
        (
            labels,
            Some(new(&[12, 24, 31], 1, DType::I64)),
            "labels has shape [12, 24, 31], and input_ids [12, 24, 32]",
        ),
        (
            labels,
            Some(new(&[12, 24, 32], 96, DType::I64)),
            "labels has label 96, which is neither below 96 nor -100",
        ),
        (labels, Some(new(&[12, 24, 32], -1, DType::I64)), "labels has label -1, "),
        (labels, Some(new(&[12, 24, 32], -100, DType::I64)), "step 0 has no label that counts"),
        (ids, Some(new(&[12, 24, 32], 96, DType::U32)), "input_ids has token 96: the model has 96"),
        ("eval_labels", Some(new(&[24, 32], 96, DType::I64)), "eval_labels has label 96"),
        (
            "eval_labels",
            Some(new(&[24, 32], -100, DType::I64)),
            "eval_labels has no label that counts",
        ),
    ] {
        let place = Place::new();
        place.rewrite("batches.safetensors", |tensors| match tensor {
            Some(tensor) => drop(tensors.insert(name.to_owned(), tensor)),
            None => drop(tensors.remove(name)),
        });
        let line = place.refused(TUNE);
        assert!(line.contains("batches.safetensors: ") && line.contains(said), "{line}");
    }
    let place = Place::new();
    place.rewrite("batches.safetensors", |tensors| {
        for name in [ids, labels] {
            let flat = tensors[name].flatten_to(1).expect("288 sequences");
            tensors.insert(name.to_owned(), flat);
        }
    });
    let line = place.refused(TUNE);
    assert!(line.contains("shape [288, 32], not [steps, sequences, length]"), "{line}");
}

#[test]
fn bad_models_are_one_line() {
    for (field, value, said) in [
        (
            "rope_parameters",
            json!({ "rope_type": "yarn" }),
            "rope_type is yarn: only default is supported",
        ),
        ("attention_bias", json!(true), "attention_bias is true: only false"),
        ("hidden_act", json!("gelu"), "hidden_act is gelu: only silu"),
        ("hidden_size", json!("64"), "invalid type: string"),
        ("hidden_size", json!(32), "has shape [96, 64], not [96, 32]"),
        ("num_hidden_layers", json!(3), "there is no tensor model.layers.2."),
        ("num_hidden_layers", json!(0), "num_hidden_layers is 0: it must be from 1 to 10000"),
        ("max_position_embeddings", json!(31), "has 32 tokens: the model reads 1 to 31"),
    ] {
        let place = Place::new();
        place.reconfigure(field, value);
        let line = place.refused(TUNE);
        assert!(line.contains(said), "{field}: {line}");
    }
    let place = Place::new();
    fs::write(place.path("model/config.json"), "{").expect("written");
    assert!(place.refused(TUNE).contains("config.json: EOF while parsing"));
    let place = Place::new();
    place.rewrite("model/model.safetensors", |tensors| drop(tensors.remove("model.norm.weight")));
    assert!(place.refused(TUNE).contains("there is no tensor model.norm.weight"));
    let place = Place::new();
    fs::write(place.path("model/model.safetensors"), [0; 100]).expect("written");
    place.refused(TUNE);
    let place = Place::new();
    fs::remove_file(place.path("model/model.safetensors")).expect("there");
    place.refused(TUNE);
    let place = Place::new();
    place.rewrite("model/model.safetensors", |tensors| {
        let other = tensors["model.norm.weight"].to_dtype(DType::U8).expect("a tensor");
        tensors.insert("model.norm.weight".to_owned(), other);
    });
    let line = place.refused(TUNE);
    assert!(line.contains("model.norm.weight") && line.contains("U8"), "{line}");
}
