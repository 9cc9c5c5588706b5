//! Input that the program refuses: one line, and exit code 2.

use std::fs;

use candle_core::{DType, Device, Tensor};
use serde_json::json;

use super::place::{Place, TUNE};

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
            "has no tokenizer.json, which a text needs",
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
        ("--export {model}", "it is the folder of the model"),
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
    let ids = "input_ids";
    let labels = "labels";
    for (name, tensor, said) in [
        (
            "attention_mask",
            Some(new(&[12, 24, 32], 1, DType::I64)),
            "tensor attention_mask is none of input_ids, labels, eval_input_ids, eval_labels",
        ),
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
}

#[test]
fn batches_without_steps_are_one_line() {
    let place = Place::new();
    place.rewrite("batches.safetensors", |tensors| {
        for name in ["input_ids", "labels"] {
            let flat = tensors[name].flatten_to(1).expect("288 sequences");
            tensors.insert(name.to_owned(), flat);
        }
    });
    let line = place.refused(TUNE);
    assert!(line.contains("shape [288, 32], not [steps, sequences, length]"), "{line}");
}

#[test]
fn evaluations_without_held_out_sequences_are_one_line() {
    let place = Place::new();
    place.rewrite("batches.safetensors", |tensors| {
        tensors.retain(|name, _| !name.starts_with("eval_"));
    });
    let line = place.refused(&format!("{TUNE} --evaluate-every 2"));
    let told = "--evaluate-every: the file of --batches has no eval_input_ids";
    assert!(line.contains(told), "{line}");
    let said = place.trained(&format!("{TUNE} --steps 1"));
    assert!(!said.contains("held out"), "{said}");
}

#[test]
fn another_family_is_one_line() {
    let place = Place::new();
    place.reconfigure("model_type", json!("gpt_neox"));
    let line = place.refused(TUNE);
    assert!(line.contains("config.json: model_type is gpt_neox: only llama, "), "{line}");
    assert!(line.trim_end().ends_with(" is supported"), "{line}");
}

#[test]
fn bad_models_are_one_line() {
    for (field, value, said) in [
        (
            "rope_parameters",
            json!({ "rope_type": "yarn" }),
            "rope_type is yarn: only default, linear or llama3 is supported",
        ),
        ("attention_bias", json!(true), "no tensor model.layers.0.self_attn.q_proj.bias"),
        ("hidden_act", json!("gelu"), "hidden_act is gelu: only silu"),
        ("sliding_window", json!(8), "sliding_window is a key whose effect is not known"),
        ("torch_dtype", json!("bfloat16"), "dtype is float32, and torch_dtype is bfloat16"),
        ("dtype", json!("bfloat16"), "in which it would lose digits"),
        (
            "num_hidden_layers",
            json!(1),
            "is not of the model that config.json describes; and 6 more",
        ),
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
}

#[test]
fn broken_folders_are_one_line() {
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

/// The weights in other forms, and adapters that would be left out.
#[test]
fn files_that_contradict_the_model_are_one_line() {
    for (from, to, said) in [
        (
            "model.safetensors",
            "pytorch_model.bin",
            "its weights are pickled by PyTorch (pytorch_model.bin), and only safetensors are read",
        ),
        (
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "it has parts of a model (model-00001-of-00002.safetensors) without model.safetensors.index.json",
        ),
        (
            "generation_config.json",
            "adapter_config.json",
            "adapter_config.json is beside the model",
        ),
    ] {
        let place = Place::new();
        let [from, to] = [from, to].map(|name| place.path("model").join(name));
        fs::rename(from, to).expect("renamed");
        let line = place.refused(TUNE);
        assert!(line.contains(said), "{line}");
    }
}

#[test]
fn a_text_with_a_token_that_the_model_lacks_is_one_line() {
    let place = Place::new();
    fs::write(place.path("text"), "a b ".repeat(1000)).expect("written");
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null,
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": { "?": 0, "a": 1, "b": 96 }, "unk_token": "?" }
    });
    fs::write(place.path("model/tokenizer.json"), tokenizer.to_string()).expect("written");
    let line = place.refused("--model {model} --data {text}");
    assert!(line.contains("finds token 96 in the text: the model has 96"), "{line}");
}

#[test]
fn an_export_beside_files_of_another_model_is_one_line() {
    for stale in [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "adapter_config.json",
        "adapters.safetensors",
        "peft",
        "tokenizer.json",
        "vocab.json",
        "chat_template.jinja",
    ] {
        let place = Place::new();
        fs::create_dir(place.path("tuned")).expect("a folder");
        fs::write(place.path("tuned").join(stale), "").expect("written");
        let line = place.refused(&format!("{TUNE} --export {{tuned}}"));
        assert!(line.contains(&format!("it holds {stale}, of another model")), "{line}");
    }
}
