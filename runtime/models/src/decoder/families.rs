//! The families of decoders, by `model_type` of `config.json`. A family is one file and a line in
//! [`FAMILIES`].

mod gemma2;
mod llama;
mod mistral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod smollm3;

use super::config::keys::{Keys, Table};
use super::config::rope::{Rotation, THETA};
use super::config::{ConfigError, DecoderConfig};

const FAMILIES: &[&Family] = &[
    &llama::FAMILY,
    &mistral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &gemma2::FAMILY,
    &phi3::FAMILY,
    &olmo2::FAMILY,
    &smollm3::FAMILY,
];

/// A family of decoders.
pub(super) struct Family {
    /// Value of `model_type`.
    pub(super) model_type: &'static str,
    /// Entry of `architectures`.
    pub(super) architecture: &'static str,
    /// Tables of keys that only some families have. The keys of all families are in
    /// [`COMMON`](super::config::keys::COMMON).
    pub(super) keys: &'static [Table],
    /// Values of absent keys.
    pub(super) defaults: Defaults,
    pub(super) rotation: Rotation,
    /// Reads the keys of `keys`, and sets the parts of the family. The given model has the sizes of
    /// the file and the parts of a Llama.
    pub(super) read: fn(&Keys<'_>, &mut DecoderConfig) -> Result<(), ConfigError>,
}

/// Values of absent keys, as in transformers.
pub(super) struct Defaults {
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    /// Number of key-value heads. `None` means the number of query heads.
    pub(super) num_key_value_heads: Option<usize>,
    /// Elements of a head. `None` means `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// Key and value of the activation.
    pub(super) activation: (&'static str, &'static str),
    pub(super) max_position_embeddings: usize,
    pub(super) rms_norm_eps: f64,
    pub(super) rope_theta: f64,
    pub(super) tie_word_embeddings: bool,
    pub(super) pad_token_id: Option<i64>,
}

/// Defaults of Llama 2 7B, which most families have inherited.
const DEFAULTS: Defaults = Defaults {
    vocab_size: 32_000,
    hidden_size: 4096,
    intermediate_size: 11_008,
    num_hidden_layers: 32,
    num_attention_heads: 32,
    num_key_value_heads: None,
    head_dim: None,
    activation: ("hidden_act", "silu"),
    max_position_embeddings: 2048,
    rms_norm_eps: 1e-6,
    rope_theta: THETA,
    tie_word_embeddings: false,
    pad_token_id: None,
};

impl Family {
    /// Returns the family with this `model_type`.
    ///
    /// # Errors
    /// [`ConfigError::Unsupported`] with the families that exist, also if a file states none.
    pub(super) fn of(model_type: Option<String>) -> Result<&'static Self, ConfigError> {
        let model_type = model_type.as_deref();
        let is = |family: &&&Self| model_type == Some(family.model_type);
        FAMILIES.iter().find(is).copied().ok_or_else(|| {
            let names: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
            let (last, others) = names.split_last().expect("there are families");
            ConfigError::Unsupported {
                name: "model_type".to_owned(),
                value: model_type.unwrap_or("missing").escape_debug().to_string(),
                supported: format!("{} or {last}", others.join(", ")),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::{Map, Value, json};

    use super::*;

    /// A config as transformers reads it from a file with these keys alone.
    #[derive(Deserialize)]
    struct Golden {
        stated: Map<String, Value>,
        read: Map<String, Value>,
    }

    /// `golden_decoders/generate.py` writes the file.
    #[test]
    fn absent_keys_have_the_values_of_transformers() {
        let text = include_str!("../../tests/golden_decoders/defaults.json");
        let goldens: Vec<Golden> = serde_json::from_str(text).expect("a list");
        let read =
            |object| DecoderConfig::from_json(&Value::Object(object).to_string()).expect("a model");
        for family in FAMILIES {
            let plain = json!({ "model_type": family.model_type });
            let is_plain = |golden: &Golden| plain == Value::Object(golden.stated.clone());
            assert!(goldens.iter().any(is_plain), "{plain}");
        }
        for Golden { stated, read: all } in goldens {
            // A key without a value in transformers would be compared with itself.
            for key in [
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
                "rms_norm_eps",
                "rope_parameters",
                "tie_word_embeddings",
                "pad_token_id",
                "initializer_range",
            ] {
                assert!(all.contains_key(key), "{key}");
            }
            let name = Value::Object(stated.clone());
            assert_eq!(read(stated), read(all), "{name}");
        }
    }
}
