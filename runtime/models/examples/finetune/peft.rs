//! Adapters as a folder of PEFT, beside the model that they adapt.

use std::collections::BTreeSet;
use std::path::Path;

use hsdp_models::decoder::Lora;
use serde_json::{Value, json};

/// The folder in that of an export. `adapter_config.json` beside `config.json` would be taken for a
/// part of the model.
pub(crate) const FOLDER: &str = "peft";

pub(crate) const CONFIG: &str = "peft/adapter_config.json";
pub(crate) const ADAPTERS: &str = "peft/adapter_model.safetensors";

/// Part of the name of each parameter of an adapter.
const MATRIX: &str = ".lora_";

/// Returns whether a parameter is a matrix of an adapter.
pub(crate) fn is_adapter(parameter: &str) -> bool {
    parameter.contains(MATRIX)
}

/// Returns the name of a matrix of an adapter in the file of PEFT.
pub(crate) fn name(parameter: &str) -> String {
    format!("base_model.model.{parameter}")
}

/// Returns the contents of `adapter_config.json` for adapters of these parameters. `base` is the
/// folder of the model, from which `AutoPeftModelForCausalLM` reads it.
pub(crate) fn config<'a>(
    lora: Lora,
    parameters: impl Iterator<Item = &'a str>,
    base: &Path,
) -> Value {
    let layers = parameters.filter_map(|name| name.split_once(MATRIX)).map(|(layer, _)| layer);
    let targets: BTreeSet<&str> = layers.filter_map(|layer| layer.rsplit('.').next()).collect();
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.to_str(),
        "inference_mode": true,
        "r": lora.rank,
        "lora_alpha": whole(lora.alpha),
        "lora_dropout": 0.0,
        "use_rslora": false,
        "bias": "none",
        "fan_in_fan_out": false,
        "target_modules": targets,
    })
}

/// Returns a number for JSON, without a point if it is whole: PEFT declares alpha as an integer.
fn whole(number: f64) -> Value {
    #[expect(clippy::cast_possible_truncation, reason = "it is compared")]
    let integer = number as i64;
    #[expect(clippy::cast_precision_loss, reason = "a difference makes it no integer")]
    let is_whole = integer as f64 == number;
    if is_whole { json!(integer) } else { json!(number) }
}
