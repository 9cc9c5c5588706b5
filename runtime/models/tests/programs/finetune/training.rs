//! Runs that train, and the folders that they export.

use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::VarBuilder;
use candle_transformers::models::llama as stock;
use hsdp_candle::{Plain, Units};
use hsdp_models::decoder::{Decoder, DecoderConfig};
use serde_json::{Value, json};

use super::place::{Place, TUNE, golden};

#[test]
fn a_model_of_transformers_is_trained_and_exported() {
    let place = Place::new();
    let said = place
        .trained(&format!("{TUNE} --recompute --norms-every 2 --out {{out}} --export {{tuned}}"));
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
    for file in ["loss.svg", "norms.svg", "trace.json", "run.lock"] {
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

/// Reads a folder by candle's own Llama and by ours, and compares the logits of held-out sequences,
/// and our loss of them.
fn same_logits(folder: &Path, loss: f64) {
    let batches = safetensors::load(golden("plain/batches.safetensors"), &Device::Cpu);
    let batches = batches.expect("tensors");
    let [tokens, labels] = ["eval_input_ids", "eval_labels"].map(|name| &batches[name]);
    let text = fs::read_to_string(folder.join("config.json")).expect("a file");
    let weights =
        safetensors::load(folder.join("model.safetensors"), &Device::Cpu).expect("tensors");
    let ours = Decoder::new(DecoderConfig::from_json(&text).expect("a model"));
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

/// The exported folder says what is true of its tensors, whatever the folder said that was read.
#[test]
fn tied_pairs_are_exported_as_they_are() {
    for (name, tie, head) in [("untied", false, true), ("onlyhead", true, false)] {
        let place = Place::of(name);
        place.trained(&format!(
            "{TUNE} --mesh 1x2 --microbatches 1 --out {{out}} --export {{tuned}}"
        ));
        let text = fs::read_to_string(golden(name).join("expected.json")).expect("a file");
        let expected: Value = serde_json::from_str(&text).expect("JSON");
        for (got, want) in
            place.losses("out").iter().zip(expected["losses"].as_array().expect("losses"))
        {
            let want = want.as_f64().expect("a number");
            assert!((got - want).abs() <= 2e-5 * want, "{name}: {got}, not {want}");
        }
        let warnings = place.path("out/warnings.jsonl");
        let told = fs::read_to_string(warnings).unwrap_or_default();
        assert_eq!(told.contains("they are not tied"), !tie, "{told}");
        assert_eq!(place.json("tuned/config.json")["tie_word_embeddings"], json!(tie));
        let file = place.path("tuned/model.safetensors");
        let tensors = safetensors::load(file, &Device::Cpu).expect("tensors");
        assert!(tensors.contains_key("model.embed_tokens.weight"));
        assert_eq!(tensors.contains_key("lm_head.weight"), head);
    }
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
    // Other windows of the text are other data.
    place.trained(&format!("--model {{model}} {small} --save-every 3 --out {{saved}}"));
    let other = small.replace("--context 8", "--context 4").replace("--steps 6", "--steps 7");
    let refused = format!("--model {{model}} {other} --save-every 3 --resume --out {{saved}}");
    let refused = place.refused(&refused);
    assert!(refused.contains("was made with context 8, this run has 4"), "{refused}");
    // A model with random weights, of the characters of the text.
    place.trained(&format!("{small} --out {{out}} --export {{new}}"));
    assert_eq!(place.json("new/config.json")["vocab_size"], 11);
    assert!(place.json("new/config.json")["model_type"].is_string());
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
    let tune = format!("{TUNE} --lora 4 --save-every 1");
    place.trained(&format!("{tune} --param-dtype bf16 --steps 2 --out {{alone}}"));
    place.trained(&format!("{tune} --steps 2 --out {{whole}}"));
    let [alone, whole] =
        ["alone/summary.json", "whole/summary.json"].map(|it| shard_bytes(&place.json(it)));
    assert_eq!(alone[0], alone[1]);
    assert!(alone[0] * 10 < whole[0], "{alone:?} beside {whole:?}");
    // The adapters go on above the same model, whether it is exported or not.
    let resumed = "--param-dtype bf16 --steps 3 --resume --out {alone} --export {tuned}";
    place.trained(&format!("{tune} {resumed}"));
    let other = place.refused(&format!("{tune} --steps 4 --resume --out {{alone}}"));
    assert!(other.contains("frozen parameters"), "{other}");
}

#[test]
fn muon_with_adamw_is_the_recipe_of_a_run_of_pytorch() {
    let place = Place::new();
    place.trained(&format!("{TUNE} --optimizer muon --out {{out}}"));
    let expected = fs::read_to_string(golden("plain/expected_muon.json")).expect("a file");
    let expected: Value = serde_json::from_str(&expected).expect("JSON");
    // The bounds of the golden runs (`decoder/golden.rs`).
    for (of_step, of_run, bound) in [("loss", "losses", 2e-6), ("grad_norm", "grad_norms", 5e-5)] {
        let got = place.of_steps("out", of_step);
        let want = expected[of_run].as_array().expect("numbers");
        assert_eq!(got.len(), want.len());
        for (step, (got, want)) in got.iter().zip(want).enumerate() {
            let want = want.as_f64().expect("a number");
            let difference = (got - want).abs() / want;
            assert!(
                difference <= bound,
                "{of_step} of step {step}: {got}, not {want}: {difference:e}"
            );
        }
    }
}

/// The program checks that bytes are as planned, and fails otherwise.
#[test]
fn each_optimizer_trains_and_goes_on_on_another_mesh() {
    for optimizer in ["adamw", "muon", "lion", "adafactor", "adamw8bit"] {
        let place = Place::new();
        let run = |out: &str, options: &str| {
            let tune = format!("{TUNE} --optimizer {optimizer} --save-every 2 --out {{{out}}}");
            place.trained(&format!("{tune} {options}"));
            place.losses(out)
        };
        let whole = run("whole", "--steps 5");
        assert!(whole[4] < whole[0], "{optimizer}: {whole:?}");
        assert_eq!(run("out", "--steps 3"), whole[..3], "{optimizer}");
        let resumed = run("out", "--steps 5 --mesh 1x2 --resume");
        for (resumed, whole) in resumed.iter().zip(&whole) {
            assert!((resumed - whole).abs() <= 2e-6 * whole, "{optimizer}: {resumed}, not {whole}");
        }
        let other = place.refused(&format!(
            "{TUNE} --optimizer {} --steps 6 --save-every 2 --out {{out}} --resume",
            if optimizer == "lion" { "adamw" } else { "lion" }
        ));
        assert!(other.contains("its optimizer is"), "{other}");
    }
}

#[test]
fn the_average_of_weights_is_evaluated_and_exported() {
    let place = Place::new();
    let run = "--steps 6 --optimizer muon --ema 0.5 --save-every 3 --out {out} --export {tuned}";
    let said = place.trained(&format!("{TUNE} {run}"));
    assert!(said.contains("held out, average of weights"), "{said}");
    let summary = place.json("out/summary.json");
    let [after, average] =
        ["eval_loss_after", "eval_loss_average"].map(|it| summary[it].as_f64().expect("a number"));
    assert!(after < average, "the weights are ahead of their average: {after} and {average}");
    same_logits(&place.path("tuned"), average);
    // The copy of the weights, as long as their average is evaluated, is not of a step.
    let [planned, measured] = shard_bytes(&summary);
    assert_eq!(measured, planned);
    let resumed = place.trained(&format!("{TUNE} {run} --mesh 2x2 --resume"));
    assert!(resumed.starts_with("all 6 steps are made\n"), "{resumed}");
    let refused = place.refused(&format!("{TUNE} --ema 1.0"));
    assert!(refused.contains("from 0 to below 1"), "{refused}");
}

/// transformers trains such a folder, and so does the program. It warns once of each contradiction.
#[test]
fn contradictions_that_change_nothing_are_warnings() {
    let place = Place::new();
    fs::write(place.path("text"), "she sells sea shells by the sea shore ".repeat(40))
        .expect("written");
    place.reconfigure("pad_token_id", json!(3));
    write_tokenizer(&place.path("model/tokenizer.json"));
    let trained = |out: &str| {
        let small = "--model {model} --data {text} --context 8 --batch 1 --steps 2 --mesh 1x2";
        place.trained(&format!("{small} --out {{{out}}}"));
        let warnings = place.path(out).join("warnings.jsonl");
        (place.losses(out), fs::read_to_string(warnings).unwrap_or_default())
    };
    let write = |name: &str, json: Value| {
        fs::write(place.path("model").join(name), json.to_string()).expect("written");
    };
    for pad in [json!("sea"), json!({ "content": "sea" })] {
        write("tokenizer_config.json", json!({ "pad_token": pad }));
        assert_eq!(trained("plain").1, "", "token 3 is the padding token of both");
    }
    let (losses, _) = trained("plain");
    let mut tokenizer = place.json("model/tokenizer.json");
    tokenizer["padding"] = json!({
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 5, "pad_type_id": 0, "pad_token": "by"
    });
    tokenizer["model"]["vocab"]["unseen"] = json!(96);
    write("tokenizer.json", tokenizer);
    write("tokenizer_config.json", json!({ "pad_token": "seen" }));
    write("generation_config.json", json!({ "pad_token_id": 4 }));
    let part = place.path("model/model-00001-of-00002.safetensors");
    fs::copy(place.path("model/model.safetensors"), part).expect("copied");
    let (warned, warnings) = trained("warned");
    assert_eq!(warned, losses);
    assert_eq!(warnings.lines().count(), 5, "{warnings}");
    for told in [
        "pad_token_id is 4 in generation_config.json, and 3 in config.json: 3 is used",
        "tokenizer.json pads with token 5, and pad_token_id is 3 in config.json: 3 is used",
        "tokenizer_config.json pads with token 9, and pad_token_id is 3 in config.json: 3 is used",
        "tokenizer.json has token 96, and the model has 96",
        "00001-of-00002.safetensors is not read, since model.safetensors is there",
    ] {
        assert_eq!(warnings.matches(told).count(), 1, "{told}: {warnings}");
    }
}
