//! The families of decoders, by `model_type` of `config.json`. A family is a constant and a line in
//! [`FAMILIES`].

use super::config::keys::{ConfigKeys, Effect, KeyTable};
use super::config::rope::{Rotation, THETA};
use super::config::{
    Biases, BlockNorms, DecoderConfig, DecoderConfigError, NormScale, Packing, QkNorm, above_0,
    wrong,
};

const FAMILIES: &[&DecoderFamily] =
    &[&LLAMA, &MISTRAL, &QWEN2, &QWEN3, &GEMMA2, &PHI3, &OLMO2, &SMOLLM3];

/// A family of decoders.
pub(super) struct DecoderFamily {
    /// Value of `model_type`.
    pub(super) model_type: &'static str,
    /// Entry of `architectures`.
    pub(super) architecture: &'static str,
    /// Tables of keys that only some families have. The keys of all families are in
    /// [`COMMON`](super::config::keys::COMMON).
    pub(super) keys: &'static [KeyTable],
    /// Values of absent keys.
    pub(super) defaults: Defaults,
    pub(super) rotation: Rotation,
    /// Reads the keys of `keys`, and sets the parts of the family. The given model has the sizes of
    /// the file and the parts of a Llama.
    pub(super) read: fn(&ConfigKeys<'_>, &mut DecoderConfig) -> Result<(), DecoderConfigError>,
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

impl DecoderFamily {
    /// Returns the family with this `model_type`.
    ///
    /// # Errors
    /// [`DecoderConfigError::Unsupported`] with the families that exist, also if a file states
    /// none.
    pub(super) fn of(model_type: Option<String>) -> Result<&'static Self, DecoderConfigError> {
        let model_type = model_type.as_deref();
        let is = |family: &&&Self| model_type == Some(family.model_type);
        FAMILIES.iter().find(is).copied().ok_or_else(|| {
            let names: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
            let (last, others) = names.split_last().expect("there are families");
            DecoderConfigError::Unsupported {
                name: "model_type".to_owned(),
                value: model_type.unwrap_or("missing").escape_debug().to_string(),
                supported: format!("{} or {last}", others.join(", ")),
            }
        })
    }
}

/// Llama: the parts that other families change.
const LLAMA: DecoderFamily = DecoderFamily {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    keys: &[&[
        (Effect::Read, &["attention_bias", "mlp_bias"]),
        (Effect::Only(&["false", "null"]), &["rope_interleaved"]),
        // `pretraining_tp` splits products of matrices into parts. transformers ignores the other
        // keys.
        (Effect::None, &["pretraining_tp", "max_sequence_length", "is_llama_config"]),
    ]],
    defaults: DEFAULTS,
    rotation: Rotation::Scaled,
    read: |keys, config| {
        config.biases = attention_biases(keys)?;
        config.biases.mlp = keys.or("mlp_bias", false)?;
        config.check_division()
    },
};

/// Mistral: a window in all layers.
const MISTRAL: DecoderFamily = DecoderFamily {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    keys: &[&[(Effect::Read, &["sliding_window"])]],
    defaults: Defaults {
        intermediate_size: 14_336,
        num_key_value_heads: Some(8),
        max_position_embeddings: 4096 * 32,
        ..DEFAULTS
    },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        let window = keys.or("sliding_window", Some(4096))?;
        config.layers.iter_mut().for_each(|layer| layer.window = window);
        Ok(())
    },
};

/// Qwen2: biases of queries, keys and values, and a window in the layers from `max_window_layers`
/// on.
const QWEN2: DecoderFamily = DecoderFamily {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    keys: &[WINDOWS],
    defaults: QWEN,
    rotation: Rotation::Scaled,
    read: |keys, config| {
        config.biases = Biases { qkv: true, output: false, mlp: false };
        read_windows(keys, config)
    },
};

/// Defaults of Qwen2 and its successors.
const QWEN: Defaults = Defaults {
    vocab_size: 151_936,
    intermediate_size: 22_016,
    num_key_value_heads: Some(32),
    max_position_embeddings: 32_768,
    ..DEFAULTS
};

/// Keys that [`read_windows`] reads.
const WINDOWS: KeyTable = &[
    (Effect::Read, &["layer_types", "use_sliding_window", "sliding_window", "max_window_layers"]),
    (Effect::Only(&["false", "null"]), &["use_mrope"]),
];

/// Reads whether all projections of attention have biases. The MLP has none.
fn attention_biases(keys: &ConfigKeys<'_>) -> Result<Biases, DecoderConfigError> {
    let biased = keys.or("attention_bias", false)?;
    Ok(Biases { qkv: biased, output: biased, mlp: false })
}

/// Reads the windows of layers.
fn read_windows(
    keys: &ConfigKeys<'_>,
    config: &mut DecoderConfig,
) -> Result<(), DecoderConfigError> {
    let window = match keys.or("use_sliding_window", false)? {
        true => keys.or("sliding_window", Some(4096))?,
        false => None,
    };
    let first = keys.or("max_window_layers", 28)?;
    config.set_windows(keys, window, |index, _| window.is_some() && index >= first)
}

/// Qwen3: norms of queries and keys by head.
const QWEN3: DecoderFamily = DecoderFamily {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    keys: &[WINDOWS, &[(Effect::Read, &["attention_bias"])]],
    defaults: Defaults { head_dim: Some(128), ..QWEN },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        config.biases = attention_biases(keys)?;
        config.qk_norm = Some(QkNorm::EachHead);
        read_windows(keys, config)
    },
};

/// Gemma 2: four norms a block that scale by 1 + w, caps of scores and logits, a scaled embedding,
/// and a window in every other layer.
const GEMMA2: DecoderFamily = DecoderFamily {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    keys: &[&[
        (
            Effect::Read,
            &[
                "hidden_activation",
                "attention_bias",
                "query_pre_attn_scalar",
                "sliding_window",
                "layer_types",
                "attn_logit_softcapping",
                "final_logit_softcapping",
            ],
        ),
        (Effect::Only(&["false", "null"]), &["use_bidirectional_attention"]),
        // The cache matters in generation only. transformers ignores the other keys.
        (Effect::None, &["cache_implementation", "hidden_act", "sliding_window_size"]),
    ]],
    defaults: Defaults {
        vocab_size: 256_000,
        hidden_size: 2304,
        intermediate_size: 9216,
        num_hidden_layers: 26,
        num_attention_heads: 8,
        num_key_value_heads: Some(4),
        head_dim: Some(256),
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        max_position_embeddings: 8192,
        tie_word_embeddings: true,
        pad_token_id: Some(0),
        ..DEFAULTS
    },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        config.biases = attention_biases(keys)?;
        config.block_norms = BlockNorms {
            before_attention: Some("input_layernorm"),
            after_attention: Some("post_attention_layernorm"),
            before_mlp: Some("pre_feedforward_layernorm"),
            after_mlp: Some("post_feedforward_layernorm"),
        };
        config.norm_scale = NormScale::OnePlusWeight;
        #[expect(clippy::cast_precision_loss, reason = "a width is below 2^24")]
        let width = config.hidden_size as f64;
        config.embedding_scale = Some(width.sqrt());
        let scalar: f64 = keys.or("query_pre_attn_scalar", 256.0)?;
        above_0(&[("query_pre_attn_scalar", scalar)])?;
        config.attention_scale = 1.0 / scalar.sqrt();
        config.attention_cap = keys.or("attn_logit_softcapping", Some(50.0))?;
        config.logit_cap = keys.or("final_logit_softcapping", Some(30.0))?;
        // transformers requires a window even if no layer uses it.
        let window = keys.or("sliding_window", 4096)?;
        config.set_windows(keys, Some(window), |index, _| index.is_multiple_of(2))?;
        config.check_division()
    },
};

/// Phi-3: packed weights of queries, keys and values, and of gate and up; a window in all layers; a
/// part of each head may be rotated.
const PHI3: DecoderFamily = DecoderFamily {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    keys: &[&[
        (Effect::Read, &["sliding_window"]),
        (Effect::Only(&["0"]), &["resid_pdrop", "embd_pdrop"]),
        (Effect::Only(&["false", "null"]), &["attention_bias", "mlp_bias", "lm_head_bias"]),
        (Effect::Only(&["1", "null"]), &["full_attn_mod", "interpolate_factor"]),
        // Only longrope, which is refused, uses it.
        (Effect::None, &["original_max_position_embeddings"]),
        // It names code that transformers does not run for this family.
        (Effect::None, &["auto_map"]),
    ]],
    defaults: Defaults {
        vocab_size: 32_064,
        hidden_size: 3072,
        intermediate_size: 8192,
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-5,
        pad_token_id: Some(32_000),
        ..DEFAULTS
    },
    rotation: Rotation::Partial,
    read: |keys, config| {
        config.packing = Packing::Packed;
        let window = keys.optional("sliding_window")?;
        config.layers.iter_mut().for_each(|layer| layer.window = window);
        Ok(())
    },
};

/// OLMo 2: norms after attention and MLP, and norms of queries and keys over all heads.
const OLMO2: DecoderFamily = DecoderFamily {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    keys: &[&[(Effect::Read, &["attention_bias"])]],
    defaults: Defaults {
        vocab_size: 50_304,
        rms_norm_eps: 1e-5,
        pad_token_id: Some(1),
        ..DEFAULTS
    },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        config.biases = attention_biases(keys)?;
        config.block_norms = BlockNorms {
            before_attention: None,
            after_attention: Some("post_attention_layernorm"),
            before_mlp: None,
            after_mlp: Some("post_feedforward_layernorm"),
        };
        config.qk_norm = Some(QkNorm::Whole);
        Ok(())
    },
};

/// SmolLM3: layers without position embeddings, which may have a window.
const SMOLLM3: DecoderFamily = DecoderFamily {
    model_type: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    keys: &[&[
        (
            Effect::Read,
            &[
                "attention_bias",
                "mlp_bias",
                "no_rope_layers",
                "no_rope_layer_interval",
                "use_sliding_window",
                "sliding_window",
                "layer_types",
            ],
        ),
        // transformers ignores these keys.
        (Effect::None, &["max_window_layers", "pretraining_tp"]),
    ]],
    defaults: Defaults {
        vocab_size: 128_256,
        hidden_size: 2048,
        num_hidden_layers: 36,
        num_attention_heads: 16,
        num_key_value_heads: Some(4),
        max_position_embeddings: 32_768,
        rope_theta: 2_000_000.0,
        tie_word_embeddings: true,
        pad_token_id: Some(128_004),
        ..DEFAULTS
    },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        config.biases = attention_biases(keys)?;
        config.biases.mlp = keys.or("mlp_bias", false)?;
        read_rope(keys, config)?;
        let window = match keys.or("use_sliding_window", false)? {
            true => keys.optional("sliding_window")?,
            false => None,
        };
        config.set_windows(keys, window, |_, layer| window.is_some() && !layer.rope)
    },
};

/// Reads the layers that have position embeddings.
fn read_rope(keys: &ConfigKeys<'_>, config: &mut DecoderConfig) -> Result<(), DecoderConfigError> {
    let interval: usize = keys.or("no_rope_layer_interval", 4)?;
    let has_rope: Vec<bool> = match keys.optional::<Vec<usize>>("no_rope_layers")? {
        Some(stated) => stated.into_iter().map(|has| has != 0).collect(),
        None if interval == 0 => {
            return wrong("no_rope_layer_interval", interval, "above 0".to_owned());
        }
        None => (1..=config.layers.len()).map(|layer| !layer.is_multiple_of(interval)).collect(),
    };
    // transformers ignores entries beyond the layers.
    if has_rope.len() < config.layers.len() {
        return Err(DecoderConfigError::Contradiction {
            first: format!("num_hidden_layers is {}", config.layers.len()),
            second: format!("no_rope_layers has {} entries", has_rope.len()),
        });
    }
    config.layers.iter_mut().zip(has_rope).for_each(|(layer, has_rope)| layer.rope = has_rope);
    Ok(())
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
