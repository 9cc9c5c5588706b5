//! The keys of a `config.json`, and their effects. A key outside the tables is refused by name.

use std::fmt;

use serde::de::{DeserializeOwned, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Number, Value};

use super::{DecoderConfigError, shown};

/// The effect of a key.
#[derive(Clone, Copy, Debug)]
pub(in crate::decoder) enum Effect {
    /// The key describes the model, which reads it.
    Read,
    /// The model supports only these values, written as JSON. Any other value would change it.
    Only(&'static [&'static str]),
    /// No effect in training.
    None,
}

/// Keys of one kind of model, or of an object in its file, grouped by effect.
pub(in crate::decoder) type KeyTable = &'static [(Effect, &'static [&'static str])];

/// Keys of all families. A family's own entry for a key takes precedence.
pub(in crate::decoder) const COMMON: KeyTable = &[
    (
        Effect::Read,
        &[
            "model_type",
            "architectures",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "rms_norm_eps",
            "rope_theta",
            "rope_parameters",
            "rope_scaling",
            "partial_rotary_factor",
            "max_position_embeddings",
            "tie_word_embeddings",
            "pad_token_id",
            "initializer_range",
            "dtype",
            "torch_dtype",
        ],
    ),
    (Effect::Only(&["0"]), &["attention_dropout"]),
    // Quantized weights would be integers with scales.
    (Effect::Only(&["null"]), &["quantization_config"]),
];

/// Keys that transformers has for all models and that change nothing in training.
pub(in crate::decoder) const GENERAL: KeyTable = &[
    // Names of the file, its origin and its tokenizer.
    (
        Effect::None,
        &[
            "transformers_version",
            "_name_or_path",
            "name_or_path",
            "_commit_hash",
            "tokenizer_class",
        ],
    ),
    // Keys that other programs have left. They do not change the model.
    (
        Effect::None,
        &["transformers.js_config", "unsloth_fixed", "unsloth_processed", "unsloth_version"],
    ),
    // Tokens that a tokenizer or a generation puts around a text.
    (
        Effect::None,
        &["bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "prefix"],
    ),
    // Options of generation.
    (
        Effect::None,
        &[
            "use_cache",
            "max_length",
            "min_length",
            "do_sample",
            "early_stopping",
            "num_beams",
            "num_beam_groups",
            "diversity_penalty",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "repetition_penalty",
            "length_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "bad_words_ids",
            "num_return_sequences",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "remove_invalid_values",
            "exponential_decay_length_penalty",
            "suppress_tokens",
            "begin_suppress_tokens",
            "task_specific_params",
        ],
    ),
    // Results that a forward returns beside logits.
    (
        Effect::None,
        &[
            "output_hidden_states",
            "output_attentions",
            "output_scores",
            "return_dict",
            "return_dict_in_generate",
            "use_return_dict",
            "tie_last_hidden_states",
        ],
    ),
    // Settings of classification heads, which a language model does not have.
    (Effect::None, &["id2label", "label2id", "num_labels", "problem_type", "finetuning_task"]),
    // Choices between implementations of the same arithmetic.
    (
        Effect::None,
        &[
            "_attn_implementation",
            "_attn_implementation_autoset",
            "attn_implementation",
            "use_bfloat16",
            "tf_legacy_loss",
        ],
    ),
    // A decoder alone has no encoder and no cross-attention.
    (Effect::Only(&["false", "null"]), &["is_encoder_decoder", "add_cross_attention"]),
    (Effect::Only(&["null"]), &["cross_attention_hidden_size"]),
    (Effect::None, &["is_decoder", "tie_encoder_decoder"]),
    // A decoder's forward has no chunks.
    (Effect::None, &["chunk_size_feed_forward"]),
    (Effect::Only(&["{}", "null"]), &["pruned_heads", "per_layer_config"]),
    // TorchScript would make two tensors of a tied pair.
    (Effect::Only(&["false", "null"]), &["torchscript"]),
];

/// Keys and values of an object.
pub(in crate::decoder) struct ConfigKeys<'a> {
    /// Prefix of a key in an error, such as `rope_scaling.`.
    prefix: &'static str,
    object: &'a Map<String, Value>,
}

impl<'a> ConfigKeys<'a> {
    pub(in crate::decoder) fn of(prefix: &'static str, object: &'a Map<String, Value>) -> Self {
        Self { prefix, object }
    }

    /// Checks that the tables have each key, and that the model supports its value. An unknown key
    /// with the value null counts as absent.
    ///
    /// # Errors
    /// [`DecoderConfigError::Unknown`] and [`DecoderConfigError::Unsupported`].
    pub(in crate::decoder) fn check(&self, tables: &[KeyTable]) -> Result<(), DecoderConfigError> {
        for (key, value) in self.object {
            let mut groups = tables.iter().copied().flatten();
            match groups.find(|(_, keys)| keys.contains(&&**key)) {
                None if value.is_null() => {}
                None => return Err(DecoderConfigError::Unknown { name: named(self.prefix, key) }),
                Some((Effect::Only(supported), _)) => {
                    check(&named(self.prefix, key), value, supported)?;
                }
                Some((Effect::Read | Effect::None, _)) => {}
            }
        }
        Ok(())
    }

    /// Returns whether the object has a key.
    pub(in crate::decoder) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// Returns the object of a key. `None` if it is absent or empty.
    ///
    /// # Errors
    /// [`DecoderConfigError::Type`]
    pub(in crate::decoder) fn object(
        &self,
        key: &str,
    ) -> Result<Option<Map<String, Value>>, DecoderConfigError> {
        Ok(self.optional::<Map<_, _>>(key)?.filter(|object| !object.is_empty()))
    }

    /// Returns the value of a key, or `default` if the key is absent.
    ///
    /// # Errors
    /// [`DecoderConfigError::Type`]
    pub(in crate::decoder) fn or<T: DeserializeOwned>(
        &self,
        key: &str,
        default: T,
    ) -> Result<T, DecoderConfigError> {
        match self.object.get(key) {
            None => Ok(default),
            Some(value) => T::deserialize(value).map_err(|error| DecoderConfigError::Type {
                name: named(self.prefix, key),
                problem: error.to_string(),
            }),
        }
    }

    /// Returns the value of a key that may be absent or null.
    ///
    /// # Errors
    /// [`DecoderConfigError::Type`]
    pub(in crate::decoder) fn optional<T: DeserializeOwned>(
        &self,
        key: &str,
    ) -> Result<Option<T>, DecoderConfigError> {
        self.or(key, None)
    }

    /// Returns the value of two keys for one setting. `None` if both are absent.
    ///
    /// # Errors
    /// [`DecoderConfigError::Type`], and [`DecoderConfigError::Contradiction`] if they differ.
    pub(in crate::decoder) fn either<T>(
        &self,
        first: &str,
        second: &str,
    ) -> Result<Option<T>, DecoderConfigError>
    where
        T: DeserializeOwned + PartialEq + fmt::Display,
    {
        let [one, other] = [self.optional::<T>(first)?, self.optional::<T>(second)?];
        agreed([(named(self.prefix, first), one), (named(self.prefix, second), other)])
    }
}

fn named(prefix: &str, key: &str) -> String {
    format!("{prefix}{}", key.escape_debug())
}

/// Returns the value that one or both of two places have for a setting. `None` if neither has one.
///
/// # Errors
/// [`DecoderConfigError::Contradiction`] if they differ.
pub(in crate::decoder) fn agreed<T: PartialEq + fmt::Display>(
    [(first, one), (second, other)]: [(String, Option<T>); 2],
) -> Result<Option<T>, DecoderConfigError> {
    match (one, other) {
        (Some(one), Some(other)) if one != other => Err(DecoderConfigError::Contradiction {
            first: format!("{first} is {one}"),
            second: format!("{second} is {other}"),
        }),
        (one, other) => Ok(one.or(other)),
    }
}

/// Checks that a value is supported.
///
/// # Errors
/// [`DecoderConfigError::Unsupported`]
fn check(
    name: &str,
    value: &Value,
    supported: &'static [&'static str],
) -> Result<(), DecoderConfigError> {
    let is = |text: &&str| {
        let supported: Value = serde_json::from_str(text).expect("a table has JSON");
        match (value.as_f64(), supported.as_f64()) {
            (Some(value), Some(supported)) => value.to_bits() == supported.to_bits(),
            _ => *value == supported,
        }
    };
    if supported.iter().any(is) {
        return Ok(());
    }
    let supported = supported.first().map_or("", |text| text.trim_matches('"')).to_owned();
    let value = match value {
        Value::String(text) => text.escape_debug().to_string(),
        other => other.to_string(),
    };
    Err(DecoderConfigError::Unsupported { name: name.to_owned(), value, supported })
}

/// Reads an object. Refuses an object that has a key twice, at any depth.
///
/// # Errors
/// [`DecoderConfigError::Json`]
pub(in crate::decoder) fn object(text: &str) -> Result<Map<String, Value>, DecoderConfigError> {
    match serde_json::from_str::<UniqueKeys>(text)?.0 {
        Value::Object(object) => Ok(object),
        _ => Err(serde_json::Error::custom("it is no JSON object").into()),
    }
}

/// A value in which no object has a key twice.
struct UniqueKeys(Value);

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue).map(Self)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(UniqueKeys(element)) = elements.next_element()? {
            all.push(element);
        }
        Ok(all.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some((key, UniqueKeys(value))) = entries.next_entry::<String, _>()? {
            if object.contains_key(&key) {
                let key = shown(key.escape_debug());
                let problem = format!("`{key}` is there twice");
                return Err(A::Error::custom(problem));
            }
            object.insert(key, value);
        }
        Ok(object.into())
    }
}
