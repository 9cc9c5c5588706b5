//! Folders of all families: trained whole and by adapters, resumed, exported, and read again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor, safetensors};
use hsdp_candle::Plain;
use hsdp_models::decoder::{Decoder, DecoderConfig};
use serde_json::{Value, json};

use super::place::{Place, TUNE};

/// Returns the golden runs of all families.
fn families() -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_decoders");
    let paths = fs::read_dir(all).expect("a folder").map(|entry| entry.expect("there").path());
    let mut families: Vec<_> = paths.filter(|path| path.join("model").is_dir()).collect();
    families.sort();
    families
}

/// Reads the tensors of a file.
fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    safetensors::load(path, &Device::Cpu).expect("tensors").into_iter().collect()
}

/// Computes the mean loss of the held-out sequences by the model of `config.json` with `weights`.
fn held_out(place: &Place, config: &Value, weights: &BTreeMap<String, Tensor>) -> f64 {
    let config = DecoderConfig::from_json(&config.to_string()).expect("a model");
    let decoder = Decoder::new(config);
    let values = weights.iter().map(|(name, it)| {
        (name.clone(), it.flatten_all().and_then(|it| it.to_vec1()).expect("f32"))
    });
    let spec = decoder.spec().expect("a model");
    let plain = Plain::new(spec, &values.collect(), hsdp::Precision::default()).expect("values");
    let batches = tensors(&place.path("batches.safetensors"));
    let loss = decoder.loss(&plain, &batches["eval_input_ids"], &batches["eval_labels"]);
    f64::from(loss.and_then(|it| it.mean()?.to_scalar::<f32>()).expect("a loss"))
}

/// Adds the adapters of `tuned/peft` to the weights of the model, as PEFT merges them.
fn merged(place: &Place) -> BTreeMap<String, Tensor> {
    let config = place.json("tuned/peft/adapter_config.json");
    let scale = config["lora_alpha"].as_f64().expect("alpha") / config["r"].as_f64().expect("r");
    let mut weights = tensors(&place.path("tuned/model.safetensors"));
    let adapters = tensors(&place.path("tuned/peft/adapter_model.safetensors"));
    let mut layers = 0;
    let mut modules = BTreeSet::new();
    for (name, a) in &adapters {
        let Some(layer) = name.strip_suffix(".lora_A.weight") else { continue };
        let b = &adapters[&format!("{layer}.lora_B.weight")];
        let largest = b.abs().and_then(|it| it.max_all()?.to_scalar::<f32>()).expect("a number");
        assert!(largest > 1e-3, "{layer} is trained");
        let layer = layer.strip_prefix("base_model.model.").expect("a name of PEFT");
        let weight = weights.get_mut(&format!("{layer}.weight")).expect("a weight");
        *weight = b.matmul(a).and_then(|it| &*weight + (it * scale)?).expect("a sum");
        layers += 1;
        modules.insert(layer.rsplit('.').next().expect("a module").to_owned());
    }
    assert_eq!(adapters.len(), 2 * layers);
    assert_eq!(config["target_modules"], json!(modules));
    // The adapted projections are those of attention.
    let is_adapted =
        |name: &&String| name.contains(".self_attn.") && name.ends_with("_proj.weight");
    assert_eq!(layers, weights.keys().filter(is_adapted).count());
    let base = config["base_model_name_or_path"].as_str().expect("a path");
    assert_eq!(Path::new(base), place.path("tuned").canonicalize().expect("a folder"));
    weights
}

/// Asserts that two losses differ by at most 1e-6 of their value.
fn assert_same(got: f64, want: f64, what: &str) {
    assert!((got - want).abs() <= 1e-6 * want, "{what}: {got}, not {want}");
}

#[test]
fn a_folder_of_each_family_is_trained_and_exported() {
    for (family, mesh) in families().iter().zip(["1x2", "2x1", "2x2"].into_iter().cycle()) {
        let place = Place::copy(family);
        let name = family.display().to_string();
        let run = format!("{TUNE} --mesh {mesh} --steps 2 --out {{out}} --export {{tuned}}");
        place.trained(&run);
        let expected = fs::read_to_string(family.join("expected_adamw.json")).expect("a file");
        let expected: Value = serde_json::from_str(&expected).expect("JSON");
        for (step, got) in place.losses("out").into_iter().enumerate() {
            let want = expected["losses"][step].as_f64().expect("a number");
            assert!((got - want).abs() <= 2e-5 * want, "{name}, {step}: {got}, not {want}");
        }
        let weights = tensors(&place.path("tuned/model.safetensors"));
        let loss = held_out(&place, &place.json("tuned/config.json"), &weights);
        let summary = place.json("out/summary.json");
        assert_same(loss, summary["eval_loss_after"].as_f64().expect("a number"), &name);
    }
}

#[test]
fn adapters_of_each_family_are_those_of_peft() {
    for (family, mesh) in families().iter().zip(["2x2", "1x2", "2x1"].into_iter().cycle()) {
        let place = Place::copy(family);
        let name = family.display().to_string();
        let run = format!("{TUNE} --lora 3 --mesh {mesh} --steps 2 --lr 0.05");
        place.trained(&format!("{run} --out {{out}} --export {{tuned}}"));
        let loss = held_out(&place, &place.json("tuned/config.json"), &merged(&place));
        let summary = place.json("out/summary.json");
        assert_same(loss, summary["eval_loss_after"].as_f64().expect("a number"), &name);
    }
}

#[test]
fn adapters_go_on_on_other_meshes_and_are_exported() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_decoders/qwen3");
    let place = Place::copy(&golden);
    let run = |out: &str, options: &str| {
        let tune = format!("{TUNE} --lora 8 --save-every 2 --out {{{out}}}");
        place.trained(&format!("{tune} {options}"));
        place.losses(out)
    };
    let whole = run("whole", "--mesh 1x2");
    assert_eq!(run("out", "--mesh 1x2 --steps 4"), whole[..4]);
    run("out", "--mesh 2x2 --steps 7 --resume");
    let resumed = run("out", "--mesh 2x1 --resume --export {tuned}");
    assert_eq!(resumed.len(), whole.len());
    for (step, (got, want)) in resumed.into_iter().zip(whole).enumerate() {
        assert_same(got, want, &format!("step {step}"));
    }
    let [whole, resumed] = ["whole/summary.json", "out/summary.json"]
        .map(|it| place.json(it)["eval_loss_after"].as_f64().expect("a number"));
    assert_same(resumed, whole, "held out");
    let loss = held_out(&place, &place.json("tuned/config.json"), &merged(&place));
    assert_same(loss, resumed, "the export");
    // A run with all steps made exports again.
    let said = place.trained(&format!(
        "{TUNE} --lora 8 --save-every 2 --out {{out}} --mesh 1x1 --resume --export {{again}}"
    ));
    assert!(said.starts_with("all 10 steps are made\n"), "{said}");
    let [first, again] = ["tuned", "again"].map(|folder| {
        fs::read(place.path(folder).join("peft/adapter_model.safetensors")).expect("adapters")
    });
    assert!(first == again, "the same adapters");
}
