//! What the files of a folder say about each other: it counts, or it is refused.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use candle_transformers::models::llama as stock;
use hsdp::RankFailure;
use hsdp::prelude::*;
use hsdp_models::decoder::{Decoder, DecoderConfig, Pretrained, PretrainedError, RopeScaling};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::batches::golden;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A copy of a golden model.
fn copy(name: &str) -> TempDir {
    let folder = TempDir::new().expect("a folder");
    for file in fs::read_dir(golden(name).join("model")).expect("a folder") {
        let file = file.expect("a file").path();
        fs::copy(&file, folder.path().join(file.file_name().expect("a name"))).expect("copied");
    }
    folder
}

fn reconfigure(folder: &Path, file: &str, changes: &Value) {
    let path = folder.join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|_| "{}".to_owned());
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    for (key, value) in changes.as_object().expect("an object") {
        json[key] = value.clone();
    }
    fs::write(&path, json.to_string()).expect("written");
}

fn rewrite(folder: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let path = folder.join("model.safetensors");
    let mut tensors = safetensors::load(&path, &Device::Cpu).expect("tensors");
    change(&mut tensors);
    safetensors::save(&tensors, &path).expect("written");
}

fn refused(folder: &Path) -> String {
    let refused = Pretrained::open(folder).expect_err("refused").to_string();
    assert_eq!(refused.lines().count(), 1, "{refused}");
    refused
}

fn names(folder: &Pretrained) -> Vec<String> {
    let llama = Decoder::new(folder.config().clone());
    llama.recorded().expect("a model").params().map(|param| param.name.clone()).collect()
}

/// Loads the model on one rank.
fn load(folder: &Pretrained) -> Result<ShardedModel, Box<PretrainedError>> {
    let decoder = Decoder::new(folder.config().clone());
    let options = ModelOptions::on(Mesh::new(1, 1).expect("a rank"));
    let loaded = hsdp::launch(1, WorldOptions::default(), |world| {
        let init = decoder.recorded().expect("a model").init(1);
        let spec = decoder.spec().expect("a model");
        Ok::<_, RankFailure>(folder.load(world, spec, options.clone(), init).map_err(Box::new))
    });
    loaded.into_iter().next().expect("a rank").expect("no panic")
}

type Change = fn(&mut HashMap<String, Tensor>);

/// A parameter that the folder has lost would begin with random values.
#[test]
fn a_folder_that_changes_after_it_was_opened_is_refused() {
    let changes: [(Change, &str); 2] = [
        (|it| drop(it.remove("model.norm.weight")), "there is no tensor model.norm.weight"),
        (
            |it| drop(it.insert("other".into(), it["model.norm.weight"].clone())),
            "tensor other is not of the model that config.json describes",
        ),
    ];
    for (change, told) in changes {
        let folder = copy("plain");
        let opened = Pretrained::open(folder.path()).expect("a model");
        rewrite(folder.path(), change);
        let refused = load(&opened).expect_err("it has changed");
        assert!(matches!(*refused, PretrainedError::Changed { .. }), "{refused}");
        let expected =
            format!("{} has changed since it was opened: {told}", folder.path().display());
        assert_eq!(refused.to_string(), expected);
    }
}

/// torch and transformers do not tie two tensors that differ in one element.
#[test]
fn a_tied_pair_is_tied_if_its_tensors_are_equal() {
    let folder = copy("pad_tied");
    let plain = Pretrained::open(folder.path()).expect("tied");
    assert!(!names(&plain).contains(&HEAD.to_owned()));
    rewrite(folder.path(), |tensors| drop(tensors.insert(HEAD.into(), tensors[EMBEDDING].clone())));
    let both = Pretrained::open(folder.path()).expect("tied");
    assert_eq!(names(&both), names(&plain));
    assert_eq!(both.warnings(), [""; 0]);
    load(&both).expect("one of them is needed");
    rewrite(folder.path(), |tensors| {
        let (rows, width) = tensors[EMBEDDING].dims2().expect("a matrix");
        let mut values =
            tensors[EMBEDDING].flatten_all().expect("it").to_vec1::<f32>().expect("f32");
        *values.last_mut().expect("it has some") += 1e-6;
        let other = Tensor::from_vec(values, (rows, width), &Device::Cpu).expect("a matrix");
        tensors.insert(HEAD.into(), other);
    });
    let differing = Pretrained::open(folder.path()).expect("not tied");
    assert!(names(&differing).contains(&HEAD.to_owned()));
    assert!(!differing.config().tie_word_embeddings);
    let told = "tie_word_embeddings is true, but model.embed_tokens.weight and lm_head.weight \
                differ: they are not tied";
    assert_eq!(differing.warnings(), [told]);
    // The export has both, and its config.json says so.
    let exported = differing.config().to_json().expect("its keys");
    assert_eq!(
        (&exported["tie_word_embeddings"], &exported["dtype"]),
        (&json!(false), &json!("float32"))
    );
    rewrite(folder.path(), |tensors| {
        tensors.remove(EMBEDDING);
        tensors.remove(HEAD);
    });
    assert!(refused(folder.path()).ends_with("there is no tensor model.embed_tokens.weight"));
}

#[test]
fn each_tensor_is_of_the_model_or_refused_by_name() {
    let folder = copy("pad");
    let table = || Tensor::ones(3, DType::F32, &Device::Cpu).expect("a tensor");
    rewrite(folder.path(), |tensors| {
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), table());
    });
    let with_table = Pretrained::open(folder.path()).expect("transformers leaves it, too");
    load(&with_table).expect("the model computes it");
    for (name, tensor, told) in [
        (
            "model.layers.0.self_attn.q_proj.bias",
            table(),
            "tensor model.layers.0.self_attn.q_proj.bias is not of the model that config.json \
             describes",
        ),
        (
            "model.layers.2.mlp.up_proj.weight",
            table(),
            "tensor model.layers.2.mlp.up_proj.weight is not of",
        ),
        ("score.weight", table(), "tensor score.weight is not of the model"),
        ("model.norm.weight", table(), "model.norm.weight has shape [3], not [24]"),
        (
            HEAD,
            Tensor::ones((96, 24), DType::F32, &Device::Cpu).expect("a tensor"),
            "lm_head.weight has shape [96, 24], not [48, 24]",
        ),
        (
            "model.norm.weight",
            Tensor::ones(24, DType::U32, &Device::Cpu).expect("a tensor"),
            "the elements of model.norm.weight are U32, not floats",
        ),
    ] {
        let folder = copy("pad");
        rewrite(folder.path(), |tensors| drop(tensors.insert(name.into(), tensor)));
        let refused = refused(folder.path());
        assert!(refused.contains(told), "{refused}");
    }
    let folder = copy("pad");
    reconfigure(folder.path(), "config.json", &json!({ "num_hidden_layers": 1 }));
    let refused = refused(folder.path());
    let told = "tensor model.layers.1.input_layernorm.weight is not of the model that config.json \
                describes; ";
    assert!(refused.contains(told) && refused.ends_with("; and 6 more"), "{refused}");
}

#[test]
fn a_dtype_that_would_lose_digits_is_refused() {
    for (stored, stated, told) in [
        (DType::F32, "float32", None),
        (DType::BF16, "float32", None),
        (DType::F16, "float32", None),
        (DType::BF16, "bfloat16", None),
        (DType::F64, "float32", None),
        (DType::F32, "bfloat16", Some("F32")),
        (DType::F32, "float16", Some("F32")),
        (DType::F16, "bfloat16", Some("F16")),
        (DType::BF16, "float16", Some("BF16")),
    ] {
        let folder = copy("pad");
        rewrite(folder.path(), |tensors| {
            tensors.values_mut().for_each(|it| *it = it.to_dtype(stored).expect("a tensor"));
        });
        reconfigure(folder.path(), "config.json", &json!({ "dtype": stated }));
        let Some(name) = told else {
            Pretrained::open(folder.path()).expect("no digit is lost");
            continue;
        };
        let refused = refused(folder.path());
        let told = format!(
            "lm_head.weight is {name}, and the dtype of config.json is {stated}, in which it would \
             lose digits"
        );
        assert!(refused.contains(&told), "{refused}");
    }
}

/// transformers takes the dtype of the first one.
#[test]
fn tensors_of_different_dtypes_need_one_that_is_stated() {
    let folder = copy("pad");
    rewrite(folder.path(), |tensors| {
        let head = tensors[HEAD].to_dtype(DType::BF16).expect("a tensor");
        tensors.insert(HEAD.into(), head);
    });
    Pretrained::open(folder.path()).expect("config.json states float32");
    reconfigure(folder.path(), "config.json", &json!({ "dtype": null }));
    let told = "lm_head.weight is BF16, model.embed_tokens.weight is F32, and config.json has no \
                dtype: add the one that all should have";
    assert!(refused(folder.path()).ends_with(told), "{}", refused(folder.path()));
}

/// transformers trains the model of `config.json`: nothing in training reads the other file.
#[test]
fn another_padding_token_for_generations_is_a_warning() {
    let folder = copy("pad");
    let with = |token: Value| {
        reconfigure(folder.path(), "generation_config.json", &json!({ "pad_token_id": token }));
        Pretrained::open(folder.path()).expect("a model")
    };
    for token in [json!(5), json!(-43), json!(null)] {
        assert!(with(token).warnings().is_empty(), "the same row");
    }
    for token in [json!(7), json!(-42), json!("7")] {
        let opened = with(token.clone());
        let told = format!(
            "pad_token_id is {token} in generation_config.json, and 5 in config.json: 5 is used"
        );
        assert_eq!(opened.warnings(), [told]);
        assert_eq!(opened.config().pad_token_id, Some(5));
    }
    fs::write(folder.path().join("generation_config.json"), "{").expect("written");
    let opened = Pretrained::open(folder.path()).expect("nothing in training reads it");
    let told =
        "generation_config.json cannot be read: EOF while parsing an object at line 1 column 1";
    assert_eq!(opened.warnings(), [told]);
    fs::write(folder.path().join("generation_config.json"), "{}").expect("written");
    // Without a padding row it is a setting of generation alone.
    reconfigure(folder.path(), "config.json", &json!({ "pad_token_id": null }));
    assert!(with(json!(7)).warnings().is_empty(), "no padding row");
}

#[test]
fn adapters_beside_the_model_are_refused() {
    for file in ["adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"] {
        let folder = copy("pad");
        fs::write(folder.path().join(file), "{}").expect("written");
        let told = format!(
            "{file} is beside the model, and adapters are not read: merge them into it, or move \
             them away"
        );
        assert!(refused(folder.path()).ends_with(&told), "{}", refused(folder.path()));
    }
}

/// As in transformers: the other rows are as they are without a padding token.
#[test]
fn a_padding_row_starts_at_zero() {
    let text = fs::read_to_string(golden("pad").join("model/config.json")).expect("a file");
    let padded = DecoderConfig::from_json(&text).expect("a model");
    let mut plain = padded.clone();
    plain.pad_token_id = None;
    let width = plain.hidden_size;
    let [padded, plain] = [padded, plain].map(|config| {
        let recorded = Decoder::new(config).recorded().expect("a model");
        let embedding = recorded.params().find(|param| param.name == EMBEDDING);
        recorded.init(3)(embedding.expect("a parameter"))
    });
    for (row, (padded, plain)) in padded.chunks(width).zip(plain.chunks(width)).enumerate() {
        match row {
            5 => assert!(padded.iter().all(|it| *it == 0.0) && plain.iter().all(|it| *it != 0.0)),
            _ => assert_eq!(padded, plain),
        }
    }
}

/// Readers of the old place would otherwise train and generate without the scaling.
#[test]
fn an_export_has_the_scaling_of_wavelengths_at_both_places() {
    let folder = copy("rope_linear");
    let before = Pretrained::open(folder.path()).expect("a model");
    let RopeScaling::Linear(factor) = before.config().rope.scaling else { panic!("it is linear") };
    let new = json!({ "rope_type": "linear", "rope_theta": 10_000.0, "factor": factor });
    let changes = json!({ "rope_parameters": new, "rope_scaling": null, "rope_theta": 10_000.0 });
    reconfigure(folder.path(), "config.json", &changes);
    let opened = Pretrained::open(folder.path()).expect("a model");
    assert_eq!(opened.config(), before.config());
    let exported = opened.config().to_json().expect("its keys");
    assert_eq!(exported["rope_parameters"], new);
    assert_eq!(exported["rope_scaling"], json!({ "type": "linear", "factor": factor }));
    let text = exported.to_string();
    assert_eq!(&DecoderConfig::from_json(&text).expect("a model"), before.config());
    assert!(serde_json::from_str::<stock::LlamaConfig>(&text).is_err(), "candle has none");
}

/// The tensors are equal, so that only the config tells the folders apart.
#[test]
fn ranks_whose_configs_differ_make_no_model() {
    let rope = json!({ "rope_type": "default", "rope_theta": 5e5 });
    for (key, value, said) in [
        ("rope_parameters", rope, "rope_theta 500000, rank 0 has rope_theta 10000"),
        ("rms_norm_eps", json!(0.5), "rms_norm_eps 0.5, rank 0 has rms_norm_eps "),
        ("pad_token_id", json!(3), "pad_token_id 3, rank 0 has pad_token_id none"),
        ("max_position_embeddings", json!(32), "max_position_embeddings 32, rank 0 has "),
    ] {
        let [one, other] = [copy("plain"), copy("plain")];
        reconfigure(other.path(), "config.json", &json!({ key: value }));
        let ends = hsdp::launch(2, WorldOptions::default(), |world| {
            let path = [&one, &other][world.rank().index()].path();
            let folder = Pretrained::open(path).expect("a folder");
            let spec = Decoder::new(folder.config().clone()).spec().expect("a model");
            let options = ModelOptions::on(Mesh::new(1, 2).expect("a mesh"));
            let imported = ShardedModel::import(world, spec, options, &folder.import());
            Ok::<_, RankFailure>(imported.map(drop).map_err(|error| error.to_string()))
        });
        let expected = format!("the model spec differs between ranks: rank 1 has {said}");
        for end in ends {
            let error = end.expect("no panic").expect_err(key);
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}
