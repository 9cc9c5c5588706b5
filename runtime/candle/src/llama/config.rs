//! The sizes of a Llama, as `config.json` of Hugging Face has them.

use std::fmt;

use candle_nn::Init;
use hsdp::{DType, ModelSpec};
use serde_json::{Map, Value, json};

use super::keys::{self, Effect, Keys, Table, agreed};
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
    /// The scaling of those wavelengths.
    pub rope_scaling: RopeScaling,
    /// The longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the head reads the weight of the embedding.
    pub tie_word_embeddings: bool,
    /// The padding token. Its row of the embedding starts at zero, and gets no gradient but that of
    /// a tied head, as in transformers.
    pub pad_token_id: Option<usize>,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// Adapters, which `config.json` does not have.
    pub lora: Option<Lora>,
}

/// The scaling of the wavelengths of position embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// A factor by which all of them are longer.
    Linear(f64),
}

impl fmt::Display for RopeScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Linear(factor) => write!(f, "linear by {factor}"),
        }
    }
}

/// The error of a `config.json` that describes no model of this kind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is no JSON, or has a key twice.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A value has another type.
    #[error("{name}: {problem}")]
    Type {
        /// The key.
        name: String,
        /// The type that it has, and that which it needs.
        problem: String,
    },
    /// A key whose effect on training is not known.
    #[error(
        "{name} is a key whose effect is not known: remove it if it changes nothing in training"
    )]
    Unknown {
        /// The key.
        name: String,
    },
    /// A setting that this model does not have.
    #[error("{name} is {value}: only {supported} is supported")]
    Unsupported {
        /// The setting.
        name: String,
        /// Its value.
        value: String,
        /// The values that this model has.
        supported: &'static str,
    },
    /// Two settings that cannot both be true.
    #[error("{first}, and {second}: they contradict each other")]
    Contradiction {
        /// The first, with its value.
        first: String,
        /// The second, with its value.
        second: String,
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

/// The keys of a Llama.
const LLAMA: Table = &[
    (
        Effect::Read,
        &[
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "rope_parameters",
            "rope_scaling",
            "max_position_embeddings",
            "tie_word_embeddings",
            "pad_token_id",
            "initializer_range",
            "dtype",
            "torch_dtype",
        ],
    ),
    (Effect::Only(&["\"llama\""]), &["model_type"]),
    // Heads of classification, for example, are other models.
    (Effect::Only(&["[\"LlamaForCausalLM\"]", "null"]), &["architectures"]),
    // Two names of one function.
    (Effect::Only(&["\"silu\"", "\"swish\""]), &["hidden_act"]),
    (Effect::Only(&["false"]), &["attention_bias", "mlp_bias"]),
    (Effect::Only(&["0"]), &["attention_dropout"]),
    (Effect::Only(&["1", "null"]), &["partial_rotary_factor"]),
    (Effect::Only(&["false", "null"]), &["rope_interleaved"]),
    // Its weights would be integers with scales.
    (Effect::Only(&["null"]), &["quantization_config"]),
    // The first cuts products of matrices into parts; transformers ignores the others.
    (Effect::None, &["pretraining_tp", "max_sequence_length", "is_llama_config"]),
];

/// The keys of `rope_parameters`, and of `rope_scaling`, its older name.
const ROPE: Table = &[
    // `type` is the older name of `rope_type`.
    (Effect::Read, &["rope_type", "type", "rope_theta", "factor"]),
    (Effect::Only(&["1", "null"]), &["partial_rotary_factor"]),
];

/// The content of a `config.json`.
#[derive(Debug)]
pub(super) struct ConfigFile {
    pub(super) config: LlamaConfig,
    /// The dtype that the file states for the tensors.
    pub(super) dtype: Option<DType>,
    /// All keys and values of the file.
    pub(super) json: Map<String, Value>,
}

impl ConfigFile {
    /// Reads the text of a `config.json`. The defaults of absent keys are those of transformers.
    ///
    /// # Errors
    /// [`ConfigError`]
    pub(super) fn parse(text: &str) -> Result<Self, ConfigError> {
        let json = keys::object(text)?;
        let keys = Keys::of("", &json);
        let model_type: String = keys.or("model_type", "llama".to_owned())?;
        if model_type != "llama" {
            return unsupported("model_type", model_type, "llama");
        }
        keys.check(&[LLAMA, keys::GENERAL])?;
        let (hidden_size, heads) =
            (keys.or("hidden_size", 4096)?, keys.or("num_attention_heads", 32)?);
        let vocab_size = keys.or("vocab_size", 32_000)?;
        let (rope_scaling, rope_theta) = rope(&keys)?;
        let config = LlamaConfig {
            vocab_size,
            hidden_size,
            intermediate_size: keys.or("intermediate_size", 11_008)?,
            num_hidden_layers: keys.or("num_hidden_layers", 32)?,
            num_attention_heads: heads,
            num_key_value_heads: keys.optional("num_key_value_heads")?.unwrap_or(heads),
            head_dim: keys.optional("head_dim")?.unwrap_or(hidden_size / heads.max(1)),
            rms_norm_eps: keys.or("rms_norm_eps", 1e-6)?,
            rope_theta,
            rope_scaling,
            max_position_embeddings: keys.or("max_position_embeddings", 2048)?,
            tie_word_embeddings: keys.or("tie_word_embeddings", false)?,
            pad_token_id: keys
                .optional("pad_token_id")?
                .map(|token| padding_row(token, vocab_size))
                .transpose()?,
            initializer_range: keys.or("initializer_range", 0.02)?,
            lora: None,
        };
        config.check()?;
        let dtype = keys.either("dtype", "torch_dtype")?.map(dtype).transpose()?;
        Ok(Self { config, dtype, json })
    }
}

/// Returns the row that a padding token names. As in PyTorch, one below 0 counts from the end.
pub(super) fn padding_row(token: i64, vocab_size: usize) -> Result<usize, ConfigError> {
    let count = i64::try_from(vocab_size).unwrap_or(i64::MAX);
    let row = if token < 0 { token.checked_add(count) } else { Some(token) };
    match row.and_then(|row| usize::try_from(row).ok()) {
        Some(row) if row < vocab_size => Ok(row),
        _ => {
            wrong("pad_token_id", token, format!("from -{count} to below {count}, the vocab_size"))
        }
    }
}

fn dtype(name: String) -> Result<DType, ConfigError> {
    match name.strip_prefix("torch.").unwrap_or(&name) {
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        "float16" => Ok(DType::F16),
        _ => unsupported("dtype", name, "float32, bfloat16 or float16"),
    }
}

/// Reads the scaling of rotary embeddings, and their theta. `rope_theta` may be in the object of
/// the scaling or beside it, and that object has two names.
fn rope(keys: &Keys<'_>) -> Result<(RopeScaling, f64), ConfigError> {
    let beside: Option<f64> =
        if keys.has("rope_theta") { Some(keys.or("rope_theta", 0.0)?) } else { None };
    let mut read: Vec<(&str, RopeScaling, f64)> = Vec::new();
    for (name, prefix) in
        [("rope_parameters", "rope_parameters."), ("rope_scaling", "rope_scaling.")]
    {
        let Some(object) = keys.object(name)? else { continue };
        let inner = Keys::of(prefix, &object);
        let scaling = rope_scaling(&inner, prefix)?;
        let theta = if inner.has("rope_theta") { Some(inner.or("rope_theta", 0.0)?) } else { None };
        let theta =
            agreed([(format!("{prefix}rope_theta"), theta), ("rope_theta".to_owned(), beside)])?;
        read.push((name, scaling, theta.unwrap_or(THETA)));
    }
    if let [(one, scaling, theta), (other, second, second_theta)] = &read[..] {
        agreed([((*one).to_owned(), Some(*scaling)), ((*other).to_owned(), Some(*second))])?;
        let of_theta = |name: &str, theta: f64| (format!("rope_theta of {name}"), Some(theta));
        agreed([of_theta(one, *theta), of_theta(other, *second_theta)])?;
    }
    let (scaling, theta) = match read.first() {
        Some((_, scaling, theta)) => (*scaling, *theta),
        None => (RopeScaling::Default, beside.unwrap_or(THETA)),
    };
    Ok((scaling, theta))
}

const THETA: f64 = 10_000.0;

/// Reads the scaling in `rope_parameters` or `rope_scaling`.
fn rope_scaling(keys: &Keys<'_>, prefix: &str) -> Result<RopeScaling, ConfigError> {
    let kind: Option<String> = keys.either("rope_type", "type")?;
    let kind = kind.as_deref().unwrap_or("default");
    if !["default", "linear"].contains(&kind) {
        return unsupported("rope_type", kind.to_owned(), "default or linear");
    }
    keys.check(&[ROPE])?;
    let factor: Option<f64> = keys.optional("factor")?;
    let contradiction = |second: String| {
        let first = format!("{prefix}rope_type is {kind}");
        Err(ConfigError::Contradiction { first, second })
    };
    match (kind, factor) {
        ("default", None) => Ok(RopeScaling::Default),
        ("default", Some(factor)) => contradiction(format!("{prefix}factor is {factor}")),
        (_, None) => contradiction(format!("{prefix}factor is missing")),
        (_, Some(factor)) => Ok(RopeScaling::Linear(factor)),
    }
}

impl LlamaConfig {
    /// Adds to a spec the settings that its parameters do not show.
    pub(super) fn stated(&self, spec: ModelSpec) -> ModelSpec {
        // The fields are named, so that one that is added later is not forgotten here.
        let Self {
            vocab_size: _,
            hidden_size: _,
            intermediate_size: _,
            num_hidden_layers: _,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps,
            rope_theta,
            rope_scaling,
            max_position_embeddings,
            tie_word_embeddings: _,
            pad_token_id,
            // Ranks compare the values that come of it.
            initializer_range: _,
            lora,
        } = self;
        let padding = pad_token_id.map_or_else(|| "none".to_owned(), |row| row.to_string());
        let spec = spec
            .setting("num_attention_heads", num_attention_heads)
            .setting("num_key_value_heads", num_key_value_heads)
            .setting("head_dim", head_dim)
            .setting("rms_norm_eps", rms_norm_eps)
            .setting("rope_theta", rope_theta)
            .setting("rope_scaling", rope_scaling)
            .setting("max_position_embeddings", max_position_embeddings)
            .setting("pad_token_id", padding);
        match lora {
            Some(Lora { rank: _, alpha }) => spec.setting("alpha of the adapters", alpha),
            None => spec,
        }
    }

    /// The largest size, 2^24: the elements of a block of the largest sizes fit 64 bits.
    pub const MAX_SIZE: usize = 1 << 24;

    /// The most blocks: a description of more would take long to plan.
    pub const MAX_LAYERS: usize = 10_000;

    /// Reads the text of a `config.json`. The defaults of absent keys are those of transformers.
    /// Each key is read, known to change nothing in training, or refused by name.
    ///
    /// # Errors
    /// [`ConfigError`], also for a model with other position embeddings, biases or activations.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        ConfigFile::parse(text).map(|file| file.config)
    }

    /// Returns the fields of a `config.json` that transformers and candle read. `rope_theta` and
    /// the scaling of wavelengths are at both their new and their old places.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let rope = match self.rope_scaling {
            RopeScaling::Default => {
                json!({ "rope_type": "default", "rope_theta": self.rope_theta })
            }
            RopeScaling::Linear(factor) => {
                json!({ "rope_type": "linear", "rope_theta": self.rope_theta, "factor": factor })
            }
        };
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
            "rope_parameters": rope,
            "rope_scaling": self.old_rope_scaling(),
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "pad_token_id": self.pad_token_id,
            "initializer_range": self.initializer_range,
            "hidden_act": "silu",
            "attention_bias": false,
            "mlp_bias": false,
        })
    }

    /// Returns the scaling of wavelengths as versions of transformers before 5 read it. Stock
    /// candle knows no linear scaling: it refuses this one, and would ignore the new one.
    pub(super) fn old_rope_scaling(&self) -> Option<Value> {
        match self.rope_scaling {
            RopeScaling::Default => None,
            RopeScaling::Linear(factor) => Some(json!({ "type": "linear", "factor": factor })),
        }
    }

    /// Returns the distribution of initial matrices.
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
        if !self.hidden_size.is_multiple_of(heads) {
            return wrong("hidden_size", self.hidden_size, format!("a multiple of {heads} heads"));
        }
        if !heads.is_multiple_of(kv_heads) {
            return wrong("num_key_value_heads", kv_heads, format!("a divisor of {heads} heads"));
        }
        if !self.head_dim.is_multiple_of(2) {
            return wrong("head_dim", self.head_dim, "even".to_owned());
        }
        let factor = match self.rope_scaling {
            RopeScaling::Default => 1.0,
            RopeScaling::Linear(factor) => factor,
        };
        let positive = [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("factor of rope_scaling", factor),
            ("initializer_range", self.initializer_range),
        ];
        if let Some((name, value)) =
            positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0))
        {
            return wrong(name, value, "above 0".to_owned());
        }
        if self.initializer_range > 1.0 {
            return wrong("initializer_range", self.initializer_range, "at most 1".to_owned());
        }
        match self.pad_token_id {
            Some(row) if row >= self.vocab_size => {
                wrong("pad_token_id", row, format!("below {}, the vocab_size", self.vocab_size))
            }
            _ => Ok(()),
        }
    }
}

fn within(name: &'static str, value: usize, most: usize) -> Result<(), ConfigError> {
    match (1..=most).contains(&value) {
        true => Ok(()),
        false => wrong(name, value, format!("from 1 to {most}")),
    }
}

fn wrong<T>(name: &'static str, value: impl ToString, must: String) -> Result<T, ConfigError> {
    Err(ConfigError::Size { name, value: value.to_string(), must })
}

fn unsupported<T>(name: &str, value: String, supported: &'static str) -> Result<T, ConfigError> {
    Err(ConfigError::Unsupported { name: name.to_owned(), value, supported })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a small model's file, with changes.
    fn read(changes: Value) -> Result<LlamaConfig, String> {
        let mut file = json!({
            "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 2, "num_attention_heads": 4
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
        assert_eq!((config.tie_word_embeddings, config.pad_token_id), (false, None));
        assert_eq!(config.rope_scaling, RopeScaling::Default);
        let all = LlamaConfig::from_json("{}").expect("Llama 2 7B");
        assert_eq!(
            (all.vocab_size, all.hidden_size, all.intermediate_size),
            (32_000, 4096, 11_008)
        );
        assert_eq!((all.num_hidden_layers, all.num_attention_heads, all.head_dim), (32, 32, 128));
    }

    #[test]
    fn both_places_of_theta_are_read_and_written() {
        let old = read(json!({ "rope_theta": 5e5 })).expect("a model");
        let nested = json!({ "rope_type": "default", "rope_theta": 5e5 });
        for new in [
            json!({ "rope_parameters": nested }),
            json!({ "rope_scaling": nested }),
            json!({ "rope_theta": 5e5, "rope_parameters": nested }),
            json!({ "rope_theta": 5e5, "rope_parameters": nested, "rope_scaling": nested }),
            json!({
                "rope_theta": 5e5, "rope_scaling": { "type": "default" }, "rope_parameters": nested
            }),
        ] {
            assert_eq!(read(new.clone()).expect("a model"), old, "{new}");
        }
        assert_eq!(LlamaConfig::from_json(&old.to_json().to_string()).expect("a model"), old);
    }

    #[test]
    fn wavelengths_may_be_scaled_under_either_name() {
        let linear = read(json!({ "rope_parameters": { "rope_type": "linear", "factor": 2 } }));
        let linear = linear.expect("a model");
        assert_eq!(linear.rope_scaling, RopeScaling::Linear(2.0));
        for other in [
            json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }),
            json!({ "rope_scaling": { "type": "linear", "rope_type": "linear", "factor": 2.0 } }),
            json!({ "rope_theta": 1e4, "rope_scaling": { "rope_type": "linear", "factor": 2.0 } }),
        ] {
            assert_eq!(read(other.clone()).expect("a model"), linear, "{other}");
        }
        assert_eq!(LlamaConfig::from_json(&linear.to_json().to_string()).expect("a model"), linear);
    }

    #[test]
    fn a_padding_token_below_0_counts_from_the_end() {
        for (token, row) in [
            (json!(null), None),
            (json!(0), Some(0)),
            (json!(95), Some(95)),
            (json!(-1), Some(95)),
            (json!(-96), Some(0)),
        ] {
            let config = read(json!({ "pad_token_id": token })).expect("a model");
            assert_eq!(config.pad_token_id, row);
            assert_eq!(
                LlamaConfig::from_json(&config.to_json().to_string()).expect("a model"),
                config
            );
        }
    }

    #[test]
    fn keys_that_change_nothing_are_taken() {
        // Keys that SmolLM, a Llama of 2023 and transformers 4 write.
        let harmless = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "bos_token_id": 0, "eos_token_id": [0, 2], "is_llama_config": true,
            "rope_interleaved": false, "rope_scaling": null, "pretraining_tp": 1,
            "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
            "transformers.js_config": { "kv_cache_dtype": {} }, "max_sequence_length": 2048,
            "attention_dropout": 0.0, "_name_or_path": "x", "return_dict": true,
            "output_attentions": false, "chunk_size_feed_forward": 0, "is_encoder_decoder": false,
            "pruned_heads": {}, "id2label": { "0": "LABEL_0" }, "temperature": 0.7,
            "rope_parameters": {}, "quantization_config": null, "num_key_value_heads": null,
            "head_dim": null,
        });
        assert_eq!(read(harmless).expect("a model"), read(json!({})).expect("a model"));
    }

    #[test]
    fn other_models_are_refused_by_name() {
        for (changes, said) in [
            (
                json!({ "rope_parameters": { "rope_type": "llama3", "low_freq_factor": 1 } }),
                "rope_type is llama3: only default or linear is supported",
            ),
            (
                json!({ "rope_scaling": { "type": "dynamic", "factor": 2 } }),
                "rope_type is dynamic: only default or linear is supported",
            ),
            (json!({ "attention_bias": true }), "attention_bias is true: only false is supported"),
            (json!({ "attention_dropout": 0.1 }), "attention_dropout is 0.1: only 0 is supported"),
            (json!({ "mlp_bias": true }), "mlp_bias is true: only false is supported"),
            (json!({ "hidden_act": "gelu" }), "hidden_act is gelu: only silu is supported"),
            (
                json!({ "model_type": "mistral", "sliding_window": 4096 }),
                "model_type is mistral: only llama is supported",
            ),
            (
                json!({ "architectures": ["LlamaForSequenceClassification"] }),
                "architectures is [\"LlamaForSequenceClassification\"]: \
                 only [\"LlamaForCausalLM\"] is supported",
            ),
            (
                json!({ "quantization_config": { "bits": 4 } }),
                r#"quantization_config is {"bits":4}: only null is supported"#,
            ),
            (
                json!({ "torch_dtype": "float64" }),
                "dtype is float64: only float32, bfloat16 or float16 is supported",
            ),
            (json!({ "torchscript": true }), "torchscript is true: only false is supported"),
            (
                json!({ "partial_rotary_factor": 0.5 }),
                "partial_rotary_factor is 0.5: only 1 is supported",
            ),
            (
                json!({ "sliding_window": 4096 }),
                "sliding_window is a key whose effect is not known: \
                 remove it if it changes nothing in training",
            ),
            (
                json!({ "rope_scaling": { "rope_type": "linear", "factor": 2, "beta_fast": 1 } }),
                "rope_scaling.beta_fast is a key whose effect is not known: \
                 remove it if it changes nothing in training",
            ),
            (
                json!({ "num_key_value_heads": 3 }),
                "num_key_value_heads is 3: it must be a divisor of 4 heads",
            ),
            (json!({ "hidden_size": 66 }), "hidden_size is 66: it must be a multiple of 4 heads"),
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
            (json!({ "initializer_range": 2 }), "initializer_range is 2: it must be at most 1"),
            (
                json!({ "pad_token_id": 96 }),
                "pad_token_id is 96: it must be from -96 to below 96, the vocab_size",
            ),
            (
                json!({ "pad_token_id": -97 }),
                "pad_token_id is -97: it must be from -96 to below 96, the vocab_size",
            ),
            (
                json!({ "rope_parameters": { "rope_type": "linear", "factor": -1 } }),
                "factor of rope_scaling is -1: it must be above 0",
            ),
            (json!({ "hidden_size": null }), "hidden_size: invalid type: null, expected usize"),
            (json!({ "rope_theta": null }), "rope_theta: invalid type: null, expected f64"),
            (
                json!({ "rope_scaling": 2 }),
                "rope_scaling: invalid type: integer `2`, expected a map",
            ),
        ] {
            assert_eq!(read(changes).expect_err("another model"), said);
        }
        for (text, said) in [
            ("", "EOF while parsing a value at line 1 column 0"),
            ("[]", "it is no JSON object"),
            (r#"{"vocab_size": 8, "vocab_size": 8}"#, "`vocab_size` is there twice at line"),
            (r#"{"rope_scaling": {"type": "x", "type": "y"}}"#, "`type` is there twice at line"),
        ] {
            let refused = LlamaConfig::from_json(text).expect_err("no model").to_string();
            assert!(refused.starts_with(said), "{text}: {refused}");
        }
    }

    #[test]
    fn contradictions_are_refused_with_both_sides() {
        for (changes, said) in [
            (
                json!({ "rope_theta": 1e4, "rope_parameters": { "rope_theta": 5e5 } }),
                "rope_parameters.rope_theta is 500000, and rope_theta is 10000",
            ),
            (
                json!({
                    "rope_scaling": { "type": "linear", "rope_type": "default", "factor": 2 }
                }),
                "rope_scaling.rope_type is default, and rope_scaling.type is linear",
            ),
            (
                json!({
                    "rope_scaling": { "type": "linear", "factor": 2 },
                    "rope_parameters": { "rope_type": "default" }
                }),
                "rope_parameters is default, and rope_scaling is linear by 2",
            ),
            (
                // transformers takes the theta of `rope_scaling`, which has its default.
                json!({
                    "rope_scaling": { "type": "default" },
                    "rope_parameters": { "rope_theta": 5e5 }
                }),
                "rope_theta of rope_parameters is 500000, and rope_theta of rope_scaling is 10000",
            ),
            (
                json!({ "rope_scaling": { "factor": 2 } }),
                "rope_scaling.rope_type is default, and rope_scaling.factor is 2",
            ),
            (
                json!({ "rope_scaling": { "type": "linear" } }),
                "rope_scaling.rope_type is linear, and rope_scaling.factor is missing",
            ),
            (
                json!({ "dtype": "float32", "torch_dtype": "bfloat16" }),
                "dtype is float32, and torch_dtype is bfloat16",
            ),
        ] {
            let refused = read(changes).expect_err("a contradiction");
            assert_eq!(refused, format!("{said}: they contradict each other"));
        }
    }
}
