//! The sizes of a Llama, as `config.json` of Hugging Face has them.

use candle_nn::Init;
use serde::Deserialize;
use serde_json::{Value, json};

use super::linear::Lora;

/// The sizes of a Llama, under their names in `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The number of different tokens.
    pub vocab_size: usize,
    /// The elements of the residual stream.
    pub hidden_size: usize,
    /// The elements between the layers behind attention.
    pub intermediate_size: usize,
    /// The number of blocks.
    pub num_hidden_layers: usize,
    /// The number of query heads.
    pub num_attention_heads: usize,
    /// The number of key-value heads, which divides that of query heads.
    pub num_key_value_heads: usize,
    /// The elements of a head, an even number.
    pub head_dim: usize,
    /// Added to the mean square in norms.
    pub rms_norm_eps: f64,
    /// The base of the wavelengths of position embeddings.
    pub rope_theta: f64,
    /// The longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the head reads the weight of the embedding.
    pub tie_word_embeddings: bool,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// Adapters, which `config.json` does not have.
    pub lora: Option<Lora>,
}

/// The error of a `config.json` that describes no model of this kind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is no JSON, a size is missing, or has another type.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A setting that this model does not have.
    #[error("{name} is {value}: only {supported} is supported")]
    Unsupported {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// The values that this model has.
        supported: &'static str,
    },
    /// A size that no model can have.
    #[error("{name} is {value}: it must be {must}")]
    Size {
        /// The size.
        name: &'static str,
        /// Its value.
        value: String,
        /// The values that are allowed.
        must: String,
    },
}

/// The fields of `config.json`. The defaults are those of transformers.
#[derive(Deserialize)]
struct File {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "rms_norm_eps")]
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_parameters: Option<Rope>,
    rope_scaling: Option<Rope>,
    #[serde(default)]
    attention_dropout: f64,
    #[serde(default = "max_position_embeddings")]
    max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "initializer_range")]
    initializer_range: f64,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    hidden_act: Option<String>,
    model_type: Option<String>,
}

#[derive(Deserialize)]
struct Rope {
    rope_theta: Option<f64>,
    /// `type` in old files.
    #[serde(alias = "type")]
    rope_type: Option<String>,
}

fn rms_norm_eps() -> f64 {
    1e-6
}

fn max_position_embeddings() -> usize {
    2048
}

fn initializer_range() -> f64 {
    0.02
}

impl LlamaConfig {
    /// The largest size, 2^24: the elements of a block of the largest sizes fit 64 bits.
    pub const MAX_SIZE: usize = 1 << 24;

    /// The most blocks: a description of more would take long to plan.
    pub const MAX_LAYERS: usize = 10_000;

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`], also for a model whose position embeddings, biases or activation are others than Llama's.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let file: File = serde_json::from_str(text)?;
        file.check_supported()?;
        let head_dim = file.hidden_size / file.num_attention_heads.max(1);
        let ropes = [file.rope_parameters, file.rope_scaling].into_iter().flatten();
        let rope_theta = ropes.filter_map(|rope| rope.rope_theta).next().or(file.rope_theta);
        let config = Self {
            vocab_size: file.vocab_size,
            hidden_size: file.hidden_size,
            intermediate_size: file.intermediate_size,
            num_hidden_layers: file.num_hidden_layers,
            num_attention_heads: file.num_attention_heads,
            num_key_value_heads: file.num_key_value_heads.unwrap_or(file.num_attention_heads),
            head_dim: file.head_dim.unwrap_or(head_dim),
            rms_norm_eps: file.rms_norm_eps,
            rope_theta: rope_theta.unwrap_or(10_000.0),
            max_position_embeddings: file.max_position_embeddings,
            tie_word_embeddings: file.tie_word_embeddings,
            initializer_range: file.initializer_range,
            lora: None,
        };
        config.check()?;
        Ok(config)
    }

    /// The fields of a `config.json` that transformers and candle read. Both the new and the old place of `rope_theta` have it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": { "rope_type": "default", "rope_theta": self.rope_theta },
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "hidden_act": "silu",
            "attention_bias": false,
            "mlp_bias": false,
        })
    }

    /// The distribution of initial matrices.
    pub(super) fn init(&self) -> Init {
        Init::Randn { mean: 0.0, stdev: self.initializer_range }
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// [`ConfigError::Size`]
    pub fn check(&self) -> Result<(), ConfigError> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            within(name, value, Self::MAX_SIZE)?;
        }
        within("num_hidden_layers", self.num_hidden_layers, Self::MAX_LAYERS)?;
        if !heads.is_multiple_of(kv_heads) {
            return wrong("num_key_value_heads", kv_heads, format!("a divisor of {heads} heads"));
        }
        if !self.head_dim.is_multiple_of(2) {
            return wrong("head_dim", self.head_dim, "even".to_owned());
        }
        let positive = [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("initializer_range", self.initializer_range),
        ];
        match positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            Some((name, value)) => wrong(name, value, "above 0".to_owned()),
            None => Ok(()),
        }
    }
}

fn within(name: &'static str, value: usize, most: usize) -> Result<(), ConfigError> {
    match (1..=most).contains(&value) {
        true => Ok(()),
        false => wrong(name, value, format!("from 1 to {most}")),
    }
}

fn wrong(name: &'static str, value: impl ToString, must: String) -> Result<(), ConfigError> {
    Err(ConfigError::Size { name, value: value.to_string(), must })
}

impl File {
    /// Refuses settings that change the arithmetic, and that this model does not have.
    fn check_supported(&self) -> Result<(), ConfigError> {
        let ropes = [&self.rope_parameters, &self.rope_scaling].into_iter().flatten();
        let of_rope = |rope: &Rope| rope.rope_type.clone().unwrap_or_else(|| "default".to_owned());
        let text = |value: &Option<String>, default: &str| {
            value.clone().unwrap_or_else(|| default.to_owned())
        };
        let settings = [
            ("model_type", text(&self.model_type, "llama"), "llama"),
            ("hidden_act", text(&self.hidden_act, "silu"), "silu"),
            ("attention_bias", self.attention_bias.to_string(), "false"),
            ("mlp_bias", self.mlp_bias.to_string(), "false"),
            ("attention_dropout", self.attention_dropout.to_string(), "0"),
        ];
        let of_ropes = ropes.map(|rope| ("rope_type", of_rope(rope), "default"));
        match settings.into_iter().chain(of_ropes).find(|(_, value, only)| value != only) {
            Some((name, value, supported)) => {
                Err(ConfigError::Unsupported { name, value, supported })
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small model's file, with changes.
    fn read(changes: Value) -> Result<LlamaConfig, String> {
        let mut file = json!({
            "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4
        });
        let Value::Object(changes) = changes else { panic!("an object") };
        for (name, value) in changes {
            file[name] = value;
        }
        LlamaConfig::from_json(&file.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let config = read(json!({})).expect("a model");
        assert_eq!((config.num_key_value_heads, config.head_dim), (4, 16));
        assert_eq!((config.rope_theta, config.rms_norm_eps), (10_000.0, 1e-6));
        assert_eq!((config.max_position_embeddings, config.initializer_range), (2048, 0.02));
        assert!(!config.tie_word_embeddings);
    }

    #[test]
    fn both_places_of_theta_are_read_and_written() {
        let old = read(json!({ "rope_theta": 5e5 })).expect("a model");
        let new = json!({ "rope_theta": 1e4, "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } });
        assert_eq!(read(new).expect("a model"), old);
        assert_eq!(LlamaConfig::from_json(&old.to_json().to_string()).expect("a model"), old);
    }

    #[test]
    fn other_models_are_refused_by_name() {
        for (changes, said) in [
            (
                json!({ "rope_parameters": { "rope_type": "llama3" } }),
                "rope_type is llama3: only default is supported",
            ),
            (
                json!({ "rope_scaling": { "type": "linear" } }),
                "rope_type is linear: only default is supported",
            ),
            (json!({ "attention_bias": true }), "attention_bias is true: only false is supported"),
            (json!({ "attention_dropout": 0.1 }), "attention_dropout is 0.1: only 0 is supported"),
            (json!({ "mlp_bias": true }), "mlp_bias is true: only false is supported"),
            (json!({ "hidden_act": "gelu" }), "hidden_act is gelu: only silu is supported"),
            (json!({ "model_type": "mistral" }), "model_type is mistral: only llama is supported"),
            (
                json!({ "num_key_value_heads": 3 }),
                "num_key_value_heads is 3: it must be a divisor of 4 heads",
            ),
            (json!({ "head_dim": 15 }), "head_dim is 15: it must be even"),
            (
                json!({ "num_attention_heads": 0 }),
                "num_attention_heads is 0: it must be from 1 to 16777216",
            ),
            (
                json!({ "num_hidden_layers": 10_001 }),
                "num_hidden_layers is 10001: it must be from 1 to 10000",
            ),
            (json!({ "rope_theta": 0 }), "rope_theta is 0: it must be above 0"),
        ] {
            assert_eq!(read(changes).expect_err("another model"), said);
        }
        assert!(
            LlamaConfig::from_json("{}")
                .expect_err("no sizes")
                .to_string()
                .contains("missing field")
        );
    }
}
