//! Decoders of transformers as the model of `hsdp plan`, `hsdp simulate` and `hsdp search`: a
//! folder, or its `config.json`, without weights.

use std::fs;
use std::path::{Path, PathBuf};

use hsdp_models::decoder::{Decoder, DecoderConfig, Lora};
use hsdp_sharding::{DType, Mesh, Plan, PlanOptions};
use serde_json::{Map, Value, json};

use crate::folder::{Folder, json};
use crate::program::hsdp;

/// Returns the published sizes of Qwen3 8B.
fn qwen3_8b() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false,
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "tie_word_embeddings": false, "max_position_embeddings": 40_960,
        "max_window_layers": 36, "use_sliding_window": false, "sliding_window": null,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "rope_scaling": null,
        "torch_dtype": "bfloat16"
    })
}

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden_decoders")
}

/// Returns the golden folders of transformers, one for each family.
fn families() -> Vec<PathBuf> {
    let entries = fs::read_dir(goldens()).expect("a folder");
    let models = entries.map(|entry| entry.expect("an entry").path().join("model"));
    let models: Vec<_> = models.filter(|model| model.is_dir()).collect();
    assert!(!models.is_empty());
    models
}

fn planned(model: &str) -> Value {
    json(&["plan", model, "--mesh", "2x3"])
}

/// Simulates a step of one sequence a rank.
fn simulated(model: &str, context: &str) -> Value {
    let machine = ["--machine", "h100-cluster", "--param-dtype", "bf16", "--context", context];
    json(&[&["simulate", model, "--mesh", "1x8"], &machine[..]].concat())
}

/// Counts the elements of all tensors in a file, by its header.
fn elements(safetensors: &Path) -> u64 {
    let bytes = fs::read(safetensors).expect("a file");
    let (length, rest) = bytes.split_first_chunk().expect("a length");
    let length = usize::try_from(u64::from_le_bytes(*length)).expect("short");
    let header: Map<String, Value> = serde_json::from_slice(&rest[..length]).expect("a header");
    let shapes = header.iter().filter(|(name, _)| *name != "__metadata__");
    let shapes = shapes.map(|(_, tensor)| tensor["shape"].as_array().expect("a shape"));
    shapes.map(|shape| shape.iter().filter_map(Value::as_u64).product::<u64>()).sum()
}

#[test]
fn a_folder_of_each_family_has_the_parameters_of_its_tensors_and_the_plan_of_training() {
    for folder in families() {
        let family = folder.display().to_string();
        let plan = planned(&family);
        assert_eq!(plan["parameters"], elements(&folder.join("model.safetensors")), "{family}");
        let text = fs::read_to_string(folder.join("config.json")).expect("a file");
        let decoder = Decoder::new(DecoderConfig::from_json(&text).expect("a decoder"));
        let mesh = Mesh::new(2, 3).expect("a mesh");
        let trained = Plan::new(decoder.spec().expect("units"), mesh, PlanOptions::default())
            .expect("a plan");
        assert_eq!(plan["fingerprint"], format!("{:016x}", trained.fingerprint()), "{family}");
        let step = simulated(&family, "64");
        assert!(step["flops"].as_f64() > Some(0.0), "{family}: {step}");
    }
}

#[test]
fn qwen3_8b_is_planned_simulated_and_searched_from_its_config_alone() {
    let folder = Folder::new();
    let config = folder.file("config.json", &qwen3_8b().to_string());
    let plan = planned(&config);
    assert_eq!(plan["parameters"], 8_190_735_360_u64);
    assert_eq!(plan["units"].as_array().map(Vec::len), Some(38));
    let with_folder = planned(&folder.name());
    let renamed = folder.at("qwen3-8b.json");
    fs::rename(&config, &renamed).expect("renamed");
    let under_another_name = planned(&renamed);
    for other in [with_folder, under_another_name] {
        assert_eq!(other["fingerprint"], plan["fingerprint"]);
    }
    // Six operations by element of a matrix and token, and twelve by score and element of a head.
    let tokens = 8.0 * 4096.0;
    let matrices = 8_190_735_360.0 - 151_936.0 * 4096.0 - (36.0 * (2.0 * 4096.0 + 256.0) + 4096.0);
    let scores = 36.0 * 32.0 * tokens * 2048.0;
    let flops = simulated(&renamed, "4096")["flops"].as_f64().expect("a number");
    let expected = 6.0 * matrices * tokens + 12.0 * scores * 128.0;
    assert!((flops / expected - 1.0).abs() < 1e-12, "{flops} {expected}");
    let space = ["--ranks", "16", "--machine", "h100-cluster", "--batch-tokens", "1048576"];
    let found = json(&[&["search", &renamed], &space[..]].concat());
    assert_eq!(found["model"], renamed);
    assert!(found["best"].as_array().is_some_and(|best| !best.is_empty()), "{found}");
}

/// The head of a tied pair is a product although it has no parameter of its own.
#[test]
fn a_tied_head_takes_the_operations_of_an_untied_one() {
    let folder = Folder::new();
    let flops = |is_tied: bool| {
        let mut config = qwen3_8b();
        config["tie_word_embeddings"] = json!(is_tied);
        let config = folder.file("model.json", &config.to_string());
        (planned(&config)["parameters"].clone(), simulated(&config, "512")["flops"].clone())
    };
    let tied = flops(true);
    let untied = flops(false);
    assert_eq!(tied.0, 8_190_735_360_u64 - 151_936 * 4096);
    assert_eq!(tied.1, untied.1);
}

/// On the host in bf16, and on a device with f32 masters of frozen parameters, too.
#[test]
fn adapters_have_the_plan_of_training() {
    let model = goldens().join("phi3/model");
    let name = model.display().to_string();
    let text = fs::read_to_string(model.join("config.json")).expect("a file");
    let config = DecoderConfig::from_json(&text).expect("a decoder");
    let adapted = Decoder::new(config).with_lora(Lora::of_rank(4));
    for (device, decoder) in
        [("cpu", adapted.clone().storing_frozen_in(DType::BF16)), ("cuda", adapted)]
    {
        let options = ["--mesh", "1x2", "--device", device, "--param-dtype", "bf16"];
        let plan = json(&[&["plan", &name, "--lora", "4"], &options[..]].concat());
        let mesh = Mesh::new(1, 2).expect("a mesh");
        let options = PlanOptions { param_dtype: DType::BF16, ..PlanOptions::default() };
        let trained = Plan::new(decoder.spec().expect("units"), mesh, options).expect("a plan");
        assert_eq!(plan["fingerprint"], format!("{:016x}", trained.fingerprint()), "{device}");
        let optimizer = plan["memory"]["places"].as_object().expect("places").values().next();
        // Two words by element of the adapters, each of A and B, of two blocks.
        let packed = [64 + (4 + 2 + 2) * 16, 4 * 16 + 64];
        let expected = 2 * 4 * 2 * 4 * (packed[0] + packed[1]) / 2;
        assert_eq!(optimizer.expect("a place")["optimizer"], expected);
    }
    let lora = ["--lora", "4", "--machine", "h100-cluster", "--context", "32"];
    let step = json(&[&["simulate", &name, "--mesh", "1x2"], &lora[..]].concat());
    let all = json(&[&["simulate", &name, "--mesh", "1x2"], &lora[2..]].concat());
    assert!(step["flops"].as_f64() < all["flops"].as_f64(), "{step} {all}");
    let space = ["--ranks", "4", "--batch-tokens", "65536", "--optimizer", "lion"];
    let found = json(&[&["search", &name], &lora[..], &space].concat());
    let best = &found["best"][0];
    let options = best["options"].as_str().expect("options");
    assert!(options.ends_with(" --lora 4 --context 32 --optimizer lion"), "{options}");
    // They and the machine repeat the step.
    let machine = ["simulate", &name, "--machine", "h100-cluster"];
    let repeated = json(&[&machine[..], &options.split(' ').collect::<Vec<_>>()].concat());
    assert_eq!(repeated["seconds"], best["seconds"]);
    let told = Folder::new().refused(&["plan", "gpt2-small", "--mesh", "1x2", "--lora", "4"]);
    assert_eq!(told, "hsdp: gpt2-small: --lora needs a decoder of transformers");
}

/// As in training.
#[test]
fn a_longer_context_than_that_of_the_model_is_refused() {
    let folder = Folder::new();
    let mut config = qwen3_8b();
    config["num_hidden_layers"] = json!(2);
    config["vocab_size"] = json!(1000);
    let config = folder.file("config.json", &config.to_string());
    let machine = ["--machine", "h100-cluster", "--context"];
    let refused = "hsdp: --context 40961: the model reads at most 40960 tokens\n";
    for command in [
        ["simulate", &config, "--mesh", "1x8"].to_vec(),
        ["search", &config, "--ranks", "8", "--batch-tokens", "any"].to_vec(),
    ] {
        let told = |context| hsdp(&[&command[..], &machine, &[context]].concat());
        let (code, _, error) = told("40961");
        assert_eq!((code, &*error), (Some(2), refused));
        assert_eq!(told("40960").0, Some(0), "{command:?}");
    }
}

/// Gemma 2 has a window in every other layer.
#[test]
fn a_window_of_some_layers_saves_their_scores() {
    let folder = Folder::new();
    let flops = |window: u64| {
        let config = json!({ "model_type": "gemma2", "sliding_window": window });
        let config = folder.file("model.json", &config.to_string());
        simulated(&config, "8192")["flops"].as_f64().expect("a number")
    };
    // 13 of 26 layers with 8 heads of 256.
    let saved = 8.0 * 8192.0 * (8192.0 / 2.0 - (4096.0 - 4096.0 / 4.0));
    let expected = 13.0 * 12.0 * 8.0 * 256.0 * saved;
    let found = flops(8192) - flops(4096);
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
}

#[test]
fn what_is_no_decoder_is_refused_in_one_line_with_the_key() {
    let folder = Folder::new();
    let refused =
        |text: &str| folder.refused(&["plan", &folder.file("model.json", text), "--mesh", "1x2"]);
    for (changes, said) in [
        (json!({ "model_type": "mixtral" }), "model_type is mixtral: only llama, mistral, qwen2,"),
        (json!({ "num_experts": 8 }), "num_experts is a key whose effect is not known"),
        (json!({ "hidden_size": "wide" }), "hidden_size: invalid type: string \"wide\""),
        (json!({ "units": [] }), "unknown field `architectures`, expected `units` or `ties`"),
    ] {
        let mut config = qwen3_8b();
        for (name, value) in changes.as_object().expect("an object") {
            config[name] = value.clone();
        }
        let error = refused(&config.to_string());
        assert!(error.starts_with("hsdp: DIR/model.json: ") && error.contains(said), "{error}");
    }
    let error = refused("{\"vocab_size\": 96,\n\"model_type\": \"llama\",\n}");
    assert_eq!(error, "hsdp: DIR/model.json: trailing comma at line 3 column 1");
    let empty = Folder::new();
    let error = empty.refused(&["plan", &empty.name(), "--mesh", "1x2"]);
    assert!(error.starts_with("hsdp: DIR/config.json: No such file or directory"), "{error}");
    let said = "a model is a file, a folder of transformers, or one of gpt2-small, ";
    assert!(error.contains(said), "{error}");
}

/// A folder names its `config.json`, which no output replaces.
#[test]
fn the_config_of_a_folder_is_not_overwritten() {
    let folder = Folder::new();
    let output = folder.file("config.json", &qwen3_8b().to_string());
    let name = folder.name();
    let machine = ["--machine", "h100-cluster"];
    let space = ["--ranks", "16", "--batch-tokens", "1048576", "--html", &output];
    for command in [
        ["plan", &name, "--mesh", "1x2", "--svg", &output].to_vec(),
        [&["simulate", &name, "--mesh", "1x2", "--trace", &output], &machine[..]].concat(),
        [&["search", &name], &machine[..], &space].concat(),
    ] {
        let told = folder.refused(&command);
        assert!(told.contains("it is an input"), "{told}");
    }
    assert_eq!(fs::read_to_string(&output).expect("it is there"), qwen3_8b().to_string());
}
