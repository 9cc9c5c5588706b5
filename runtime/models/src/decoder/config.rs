//! Sizes and parts of a decoder, and `config.json` of transformers, which describes them.

pub(super) mod keys;
pub(super) mod rope;

use std::fmt;

use candle_nn::Init;
use hsdp::{DType, ModelSpec};
use serde_json::{Map, Value, json};

use self::keys::{COMMON, ConfigKeys, GENERAL};
use self::rope::{Rope, RopeDefaults};
use super::families::DecoderFamily;
use super::layers::Lora;

/// Sizes and parts of a decoder. Fields that `config.json` has are named as there.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Elements of the residual stream.
    pub hidden_size: usize,
    /// Elements between the projections of the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key-value heads. It divides the number of query heads.
    pub num_key_value_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Number that norms add to the mean square.
    pub rms_norm_eps: f64,
    /// Position embeddings.
    pub rope: Rope,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the head reads the weight of the embedding.
    pub tie_word_embeddings: bool,
    /// The padding token. Its row of the embedding starts at zero. As in transformers, the row gets
    /// a gradient only from a tied head.
    pub pad_token_id: Option<usize>,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// Attention of each block.
    pub layers: Vec<Layer>,
    /// Norms of a block.
    pub block_norms: BlockNorms,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Scale of a norm with a weight.
    pub norm_scale: NormScale,
    /// Projections that have a bias.
    pub biases: Biases,
    /// Form of the weights of projections.
    pub packing: Packing,
    /// Activation of the gate behind attention.
    pub activation: Activation,
    /// Factor of the embedding.
    pub embedding_scale: Option<f64>,
    /// Factor of scores.
    pub attention_scale: f64,
    /// Cap of scores, which become `cap * tanh(score / cap)`.
    pub attention_cap: Option<f64>,
    /// Cap of logits.
    pub logit_cap: Option<f64>,
    /// Adapters. `config.json` does not describe them.
    pub lora: Option<Lora>,
    json: ConfigSource,
}

/// Attention of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Number of keys that a query sees, including its own. `None` for all keys up to its own.
    pub window: Option<usize>,
    /// Whether queries and keys are rotated.
    pub rope: bool,
}

/// Names of a block's norms. Norms before attention and MLP normalize their input, and norms after
/// them normalize the output before it is added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct BlockNorms {
    pub before_attention: Option<&'static str>,
    pub after_attention: Option<&'static str>,
    pub before_mlp: Option<&'static str>,
    pub after_mlp: Option<&'static str>,
}

/// Norms of queries and keys, `q_norm` and `k_norm`, before the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head is normed by itself. All heads share one weight.
    EachHead,
    /// All heads are normed as one row.
    Whole,
}

/// Scale of a norm with a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormScale {
    /// The weight, which starts at 1.
    Weight,
    /// 1 + the weight, which starts at 0.
    OnePlusWeight,
}

impl NormScale {
    /// Returns the initial weight.
    pub(super) fn init(self) -> Init {
        match self {
            Self::Weight => Init::Const(1.0),
            Self::OnePlusWeight => Init::Const(0.0),
        }
    }
}

/// Projections that have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// Biases of queries, keys and values.
    pub qkv: bool,
    /// Bias of attention's output.
    pub output: bool,
    /// Biases of the MLP.
    pub mlp: bool,
}

/// Form of the weights of projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// `q_proj`, `k_proj` and `v_proj`, `gate_proj` and `up_proj`.
    Separate,
    /// `qkv_proj` and `gate_up_proj`.
    Packed,
}

/// Activation of the MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
}

/// The `config.json` that a model was read from. It does not take part in the comparison of models.
#[derive(Clone, Debug)]
struct ConfigSource(Map<String, Value>);

impl PartialEq for ConfigSource {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// Error of a `config.json` that describes no decoder. Its text is one line that shortens long
/// names and values.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecoderConfigError {
    /// The text is no JSON, or has a key twice.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A value has the wrong type.
    #[error("{}: {}", shown(.name), shown(.problem))]
    Type {
        /// Name of the key.
        name: String,
        /// The type of the value, and the required type.
        problem: String,
    },
    /// A key has an unknown effect on training.
    #[error(
        "{} is a key whose effect is not known: remove it if it changes nothing in training",
        shown(.name)
    )]
    Unknown {
        /// Name of the key.
        name: String,
    },
    /// This model does not have a setting.
    #[error("{} is {}: only {supported} is supported", shown(.name), shown(.value))]
    Unsupported {
        /// Name of the setting.
        name: String,
        /// Value of the setting.
        value: String,
        /// Values that this model supports.
        supported: String,
    },
    /// Two settings contradict each other.
    #[error("{}, and {}: they contradict each other", shown(.first), shown(.second))]
    Contradiction {
        /// The first setting, with its value.
        first: String,
        /// The second setting, with its value.
        second: String,
    },
    /// A size is not possible.
    #[error("{name} is {}: it must be {must}", shown(.value))]
    Size {
        /// Name of the size.
        name: &'static str,
        /// Value of the size.
        value: String,
        /// Description of the allowed values.
        must: String,
    },
    /// Fields were changed after the model was read, to values that no key expresses.
    #[error("no config.json of this family has the changed {}", .fields.join(", "))]
    Changed {
        /// Names of the fields.
        fields: Vec<&'static str>,
    },
}

/// Shortens and escapes a name or a value of a file for an error.
pub(super) fn shown(text: impl fmt::Display) -> String {
    hsdp_warnings::cut(text, 100)
}

/// Content of a `config.json`.
#[derive(Debug)]
pub(super) struct ConfigFile {
    pub(super) config: DecoderConfig,
    /// The dtype that the file states for the tensors.
    pub(super) dtype: Option<DType>,
}

impl ConfigFile {
    /// Reads the text of a `config.json`. Absent keys have the defaults of transformers.
    ///
    /// # Errors
    /// [`DecoderConfigError`]
    pub(super) fn parse(text: &str) -> Result<Self, DecoderConfigError> {
        Self::of(keys::object(text)?)
    }

    fn of(mut json: Map<String, Value>) -> Result<Self, DecoderConfigError> {
        let keys = ConfigKeys::of("", &json);
        let family = DecoderFamily::of(keys.optional("model_type")?)?;
        keys.check(&[family.keys, &[COMMON, GENERAL]].concat())?;
        let architectures = json!([family.architecture]);
        match json.get("architectures") {
            None | Some(Value::Null) => {}
            Some(stated) if *stated == architectures => {}
            // Classification heads, for example, belong to other models.
            Some(stated) => {
                let supported = architectures.to_string();
                return unsupported("architectures", stated.to_string(), &supported);
            }
        }
        let mut config = DecoderConfig::read(family, &keys)?;
        (family.read)(&keys, &mut config)?;
        config.check()?;
        let dtype = keys.either("dtype", "torch_dtype")?.map(dtype).transpose()?;
        json.insert("architectures".to_owned(), architectures);
        config.json = ConfigSource(json);
        Ok(Self { config, dtype })
    }
}

/// Returns the row that a padding token names. As in PyTorch, a negative token counts from the end.
pub(super) fn padding_row(token: i64, vocab_size: usize) -> Result<usize, DecoderConfigError> {
    let count = i64::try_from(vocab_size).unwrap_or(i64::MAX);
    let row = if token < 0 { token.checked_add(count) } else { Some(token) };
    match row.and_then(|row| usize::try_from(row).ok()) {
        Some(row) if row < vocab_size => Ok(row),
        _ => {
            wrong("pad_token_id", token, format!("from -{count} to below {count}, the vocab_size"))
        }
    }
}

fn dtype(name: String) -> Result<DType, DecoderConfigError> {
    match name.strip_prefix("torch.").unwrap_or(&name) {
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        "float16" => Ok(DType::F16),
        _ => unsupported("dtype", name, "float32, bfloat16 or float16"),
    }
}

fn activation(
    keys: &ConfigKeys<'_>,
    name: &str,
    default: &str,
) -> Result<Activation, DecoderConfigError> {
    let stated: String = keys.or(name, default.to_owned())?;
    match &*stated {
        // Both are names of one function.
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        _ => unsupported(name, stated, "silu or gelu_pytorch_tanh"),
    }
}

fn or_none(value: Option<impl fmt::Display>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

impl DecoderConfig {
    /// Adds the settings that parameters do not show to a spec.
    pub(super) fn stated(&self, spec: ModelSpec) -> ModelSpec {
        // The pattern names all fields, so that a new field is not forgotten here.
        let Self {
            vocab_size: _,
            hidden_size: _,
            intermediate_size: _,
            num_hidden_layers: _,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps,
            rope: Rope { theta, scaling, rotated },
            max_position_embeddings,
            tie_word_embeddings: _,
            pad_token_id,
            // Ranks compare the initial values themselves.
            initializer_range: _,
            layers,
            // The names of parameters show norms, biases and packing.
            block_norms: _,
            qk_norm,
            norm_scale,
            biases: _,
            packing: _,
            activation,
            embedding_scale,
            attention_scale,
            attention_cap,
            logit_cap,
            lora,
            json: _,
        } = self;
        // Checkpoints store these texts, so they must not change with `Debug`.
        let of_queries_and_keys = match qk_norm {
            None => "none",
            Some(QkNorm::EachHead) => "each head by itself",
            Some(QkNorm::Whole) => "all heads as one row",
        };
        let scale = match norm_scale {
            NormScale::Weight => "weight",
            NormScale::OnePlusWeight => "1 + weight",
        };
        let activation = match activation {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_tanh",
        };
        let spec = spec
            .setting("num_attention_heads", num_attention_heads)
            .setting("num_key_value_heads", num_key_value_heads)
            .setting("head_dim", head_dim)
            .setting("rms_norm_eps", rms_norm_eps)
            .setting("rope_theta", theta)
            .setting("rope_scaling", scaling)
            .setting("rotated elements of a head", rotated)
            .setting("max_position_embeddings", max_position_embeddings)
            .setting("pad_token_id", or_none(*pad_token_id))
            .setting("norms of queries and keys", of_queries_and_keys)
            .setting("scale of norms", scale)
            .setting("activation", activation)
            .setting("embedding_scale", or_none(*embedding_scale))
            .setting("attention_scale", attention_scale)
            .setting("attention_cap", or_none(*attention_cap))
            .setting("logit_cap", or_none(*logit_cap));
        let mut first = 0;
        let spec = layers.chunk_by(|one, next| one == next).fold(spec, |spec, alike| {
            let last = first + alike.len() - 1;
            let name = format!("layers {first} to {last}");
            first = last + 1;
            let Layer { window, rope } = alike[0];
            let rotated = if rope { "rotated" } else { "not rotated" };
            spec.setting(name, format_args!("window {}, {rotated}", or_none(window)))
        });
        match lora {
            Some(Lora { rank: _, alpha }) => spec.setting("alpha of the adapters", alpha),
            None => spec,
        }
    }

    /// Maximum size, 2^24. The elements of a block of such sizes fit 64 bits.
    pub const MAX_SIZE: usize = 1 << 24;

    /// Maximum number of blocks. A description of more would take long to plan.
    pub const MAX_LAYERS: usize = 10_000;

    /// Reads the text of a `config.json`. `model_type` chooses the family, and other absent keys
    /// have the defaults of transformers. Each key is read, known to change nothing in training, or
    /// refused by name. An unknown key with the value null counts as absent.
    ///
    /// # Errors
    /// [`DecoderConfigError`], also for a model with unsupported parts.
    pub fn from_json(text: &str) -> Result<Self, DecoderConfigError> {
        ConfigFile::parse(text).map(|file| file.config)
    }

    /// Returns the `config.json` of this model with weights in f32. It has the keys of the text
    /// that the model was read from, with the current `tie_word_embeddings`, but no `auto_map`,
    /// which names files of code that are not beside an export. Theta and the scaling of
    /// wavelengths are also at their old places, the only ones that stock candle and old versions
    /// of transformers read. If fields were changed, it has the present sizes and position
    /// embeddings in place of those of the text.
    ///
    /// # Errors
    /// [`DecoderConfigError`] if the fields make no model, or a model that the keys of this family
    /// cannot express, such as one with other windows than in the text.
    pub fn to_json(&self) -> Result<Value, DecoderConfigError> {
        let own = Self { lora: None, ..self.clone() };
        let mut json = self.of_text();
        let is_unchanged = ConfigFile::of(json.clone()).is_ok_and(|file| file.config == own);
        if !is_unchanged {
            self.write_fields(&mut json);
            let fields = own.differing(&ConfigFile::of(json.clone())?.config);
            if !fields.is_empty() {
                return Err(DecoderConfigError::Changed { fields });
            }
        }
        Ok(Value::Object(json))
    }

    /// Returns the keys to export from the text that the model was read from.
    fn of_text(&self) -> Map<String, Value> {
        let mut json = self.json.0.clone();
        for key in ["torch_dtype", "auto_map"] {
            json.remove(key);
        }
        json.insert("dtype".to_owned(), json!("float32"));
        json.insert("tie_word_embeddings".to_owned(), json!(self.tie_word_embeddings));
        self.rope.write_old(&mut json);
        json
    }

    /// Replaces the sizes and the position embeddings, which have the same keys in all families.
    fn write_fields(&self, json: &mut Map<String, Value>) {
        for (key, value) in [
            ("vocab_size", json!(self.vocab_size)),
            ("hidden_size", json!(self.hidden_size)),
            ("intermediate_size", json!(self.intermediate_size)),
            ("num_hidden_layers", json!(self.num_hidden_layers)),
            ("num_attention_heads", json!(self.num_attention_heads)),
            ("num_key_value_heads", json!(self.num_key_value_heads)),
            ("head_dim", json!(self.head_dim)),
            ("rms_norm_eps", json!(self.rms_norm_eps)),
            ("max_position_embeddings", json!(self.max_position_embeddings)),
            ("pad_token_id", json!(self.pad_token_id)),
            ("initializer_range", json!(self.initializer_range)),
        ] {
            json.insert(key.to_owned(), value);
        }
        for key in ["rope_parameters", "rope_scaling"] {
            json.remove(key);
        }
        self.rope.write_old(json);
    }

    /// Returns the names of the fields that differ from another model's.
    fn differing(&self, other: &Self) -> Vec<&'static str> {
        macro_rules! differing {
            ($($field:ident),*) => {{
                // The pattern names all fields, so that a new field is not forgotten here.
                let Self { $($field,)* json: _ } = self;
                let fields = [$((stringify!($field), *$field != other.$field)),*];
                fields.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
            }};
        }
        differing!(
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps,
            rope,
            max_position_embeddings,
            tie_word_embeddings,
            pad_token_id,
            initializer_range,
            layers,
            block_norms,
            qk_norm,
            norm_scale,
            biases,
            packing,
            activation,
            embedding_scale,
            attention_scale,
            attention_cap,
            logit_cap,
            lora
        )
    }

    /// Reads the keys that all families have. The parts are those of a Llama.
    fn read(family: &DecoderFamily, keys: &ConfigKeys<'_>) -> Result<Self, DecoderConfigError> {
        let defaults = &family.defaults;
        let hidden_size = keys.or("hidden_size", defaults.hidden_size)?;
        let heads = keys.or("num_attention_heads", defaults.num_attention_heads)?;
        let layers = keys.or("num_hidden_layers", defaults.num_hidden_layers)?;
        if !(1..=Self::MAX_LAYERS).contains(&layers) {
            return wrong("num_hidden_layers", layers, format!("from 1 to {}", Self::MAX_LAYERS));
        }
        let vocab_size = keys.or("vocab_size", defaults.vocab_size)?;
        let head_dim = match defaults.head_dim {
            Some(default) => keys.or("head_dim", default)?,
            None => keys.optional("head_dim")?.unwrap_or(hidden_size / heads.max(1)),
        };
        let max_position_embeddings =
            keys.or("max_position_embeddings", defaults.max_position_embeddings)?;
        let pad_token_id: Option<i64> = keys.or("pad_token_id", defaults.pad_token_id)?;
        let DecoderFamily { rotation, .. } = *family;
        let (activation_key, activation_default) = defaults.activation;
        let theta = defaults.rope_theta;
        let beside = RopeDefaults { rotation, theta, head_dim, max_position_embeddings };
        Ok(Self {
            vocab_size,
            hidden_size,
            intermediate_size: keys.or("intermediate_size", defaults.intermediate_size)?,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: keys
                .or("num_key_value_heads", defaults.num_key_value_heads)?
                .unwrap_or(heads),
            head_dim,
            rms_norm_eps: keys.or("rms_norm_eps", defaults.rms_norm_eps)?,
            rope: rope::read(keys, beside)?,
            max_position_embeddings,
            tie_word_embeddings: keys.or("tie_word_embeddings", defaults.tie_word_embeddings)?,
            pad_token_id: pad_token_id.map(|token| padding_row(token, vocab_size)).transpose()?,
            initializer_range: keys.or("initializer_range", 0.02)?,
            layers: vec![Layer { window: None, rope: true }; layers],
            block_norms: BlockNorms {
                before_attention: Some("input_layernorm"),
                after_attention: None,
                before_mlp: Some("post_attention_layernorm"),
                after_mlp: None,
            },
            qk_norm: None,
            norm_scale: NormScale::Weight,
            biases: Biases::default(),
            packing: Packing::Separate,
            activation: activation(keys, activation_key, activation_default)?,
            embedding_scale: None,
            #[expect(clippy::cast_precision_loss, reason = "a head is narrow")]
            attention_scale: 1.0 / (head_dim as f64).sqrt(),
            attention_cap: None,
            logit_cap: None,
            lora: None,
            json: ConfigSource(Map::new()),
        })
    }

    /// Gives `window` to the layers that `layer_types` names. If it is absent, gives it to the
    /// layers that `by_default` selects.
    pub(super) fn set_windows(
        &mut self,
        keys: &ConfigKeys<'_>,
        window: Option<usize>,
        by_default: impl Fn(usize, &Layer) -> bool,
    ) -> Result<(), DecoderConfigError> {
        let types: Option<Vec<String>> = keys.optional("layer_types")?;
        if let Some(types) = types.as_ref().filter(|types| types.len() != self.layers.len()) {
            return Err(DecoderConfigError::Contradiction {
                first: format!("num_hidden_layers is {}", self.layers.len()),
                second: format!("layer_types has {} entries", types.len()),
            });
        }
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let is_sliding = match types.as_ref().map(|types| &*types[index]) {
                None => by_default(index, layer),
                // transformers accepts both names.
                Some("full_attention" | "attention") => false,
                Some("sliding_attention") => true,
                Some(other) => {
                    let supported = "full_attention or sliding_attention";
                    return unsupported("layer_types", other.escape_debug().to_string(), supported);
                }
            };
            if is_sliding && window.is_none() {
                let why = match keys.or("use_sliding_window", false)? {
                    true => "there is no sliding_window",
                    false => "use_sliding_window is false",
                };
                return Err(DecoderConfigError::Contradiction {
                    first: format!("layer {index} has sliding_attention"),
                    second: why.to_owned(),
                });
            }
            layer.window = window.filter(|_| is_sliding);
        }
        Ok(())
    }

    /// Checks that heads divide the width, as transformers requires for some families.
    pub(super) fn check_division(&self) -> Result<(), DecoderConfigError> {
        let size = self.hidden_size;
        let heads = self.num_attention_heads;
        match heads == 0 || size.is_multiple_of(heads) {
            true => Ok(()),
            false => wrong("hidden_size", size, format!("a multiple of {heads} heads")),
        }
    }

    /// Returns the distribution of initial matrices.
    pub(super) fn init(&self) -> Init {
        Init::Randn { mean: 0.0, stdev: self.initializer_range }
    }

    /// Checks that the sizes are possible.
    ///
    /// # Errors
    /// [`DecoderConfigError::Size`]
    pub fn check(&self) -> Result<(), DecoderConfigError> {
        let heads = self.num_attention_heads;
        let kv_heads = self.num_key_value_heads;
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            within(name, value)?;
        }
        let layers = self.num_hidden_layers;
        if !(1..=Self::MAX_LAYERS).contains(&layers) || layers != self.layers.len() {
            let must = format!("from 1 to {}, and the number of layers", Self::MAX_LAYERS);
            return wrong("num_hidden_layers", layers, must);
        }
        for window in self.layers.iter().filter_map(|layer| layer.window) {
            within("sliding_window", window)?;
        }
        if heads * self.head_dim > Self::MAX_SIZE {
            let most = format!("at most {} by the number of heads, {heads}", Self::MAX_SIZE);
            return wrong("head_dim", self.head_dim, most);
        }
        if !heads.is_multiple_of(kv_heads) {
            return wrong("num_key_value_heads", kv_heads, format!("a divisor of {heads} heads"));
        }
        self.rope.check()?;
        if 2 * self.rope.pairs() > self.head_dim {
            return wrong("head_dim", self.head_dim, "even".to_owned());
        }
        above_0(&[
            ("rms_norm_eps", self.rms_norm_eps),
            ("initializer_range", self.initializer_range),
            ("scale of scores", self.attention_scale),
            ("scale of the embedding", self.embedding_scale.unwrap_or(1.0)),
            ("attn_logit_softcapping", self.attention_cap.unwrap_or(1.0)),
            ("final_logit_softcapping", self.logit_cap.unwrap_or(1.0)),
        ])?;
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

fn within(name: &'static str, value: usize) -> Result<(), DecoderConfigError> {
    match (1..=DecoderConfig::MAX_SIZE).contains(&value) {
        true => Ok(()),
        false => wrong(name, value, format!("from 1 to {}", DecoderConfig::MAX_SIZE)),
    }
}

/// Checks that numbers are finite and above 0.
pub(super) fn above_0(numbers: &[(&'static str, f64)]) -> Result<(), DecoderConfigError> {
    let is_wrong = |(_, value): &&(_, f64)| !(value.is_finite() && *value > 0.0);
    match numbers.iter().find(is_wrong) {
        None => Ok(()),
        Some((name, value)) => wrong(name, value, "above 0".to_owned()),
    }
}

pub(super) fn wrong<T>(
    name: &'static str,
    value: impl ToString,
    must: String,
) -> Result<T, DecoderConfigError> {
    Err(DecoderConfigError::Size { name, value: value.to_string(), must })
}

fn unsupported<T>(name: &str, value: String, supported: &str) -> Result<T, DecoderConfigError> {
    let name = name.to_owned();
    let supported = supported.to_owned();
    Err(DecoderConfigError::Unsupported { name, value, supported })
}

#[cfg(test)]
mod tests {
    use super::rope::RopeScaling;
    use super::*;

    /// Reads the file of a small Llama, with changes.
    fn read(changes: Value) -> Result<DecoderConfig, String> {
        let mut file = json!({
            "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 2, "num_attention_heads": 4
        });
        let Value::Object(changes) = changes else { panic!("an object") };
        for (name, value) in changes {
            file[name] = value;
        }
        DecoderConfig::from_json(&file.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_follow_the_sizes_that_are_stated() {
        let config = read(json!({})).expect("a model");
        assert_eq!((config.num_key_value_heads, config.head_dim), (4, 16));
    }

    /// Reads the windows of a model, by layer.
    fn windows(mut changes: Value) -> Vec<Option<usize>> {
        changes["num_key_value_heads"] = json!(4);
        let config = read(changes).expect("a model");
        config.layers.iter().map(|layer| layer.window).collect()
    }

    #[test]
    fn windows_are_those_of_transformers() {
        assert_eq!(windows(json!({})), [None, None]);
        assert_eq!(windows(json!({ "model_type": "mistral" })), [Some(4096), Some(4096)]);
        assert_eq!(windows(json!({ "model_type": "mistral", "sliding_window": null })), [None; 2]);
        let phi3 =
            |window| json!({ "model_type": "phi3", "pad_token_id": 0, "sliding_window": window });
        assert_eq!(windows(phi3(7)), [Some(7), Some(7)]);
        let qwen2 = |used, first| {
            json!({ "model_type": "qwen2", "use_sliding_window": used, "sliding_window": 8,
                "max_window_layers": first })
        };
        assert_eq!(windows(qwen2(true, 1)), [None, Some(8)]);
        assert_eq!(windows(qwen2(true, 28)), [None, None]);
        assert_eq!(windows(qwen2(false, 0)), [None, None]);
        assert_eq!(windows(json!({ "model_type": "gemma2" })), [Some(4096), None]);
        let types = json!(["attention", "sliding_attention"]);
        let gemma2 = json!({ "model_type": "gemma2", "layer_types": types, "sliding_window": 3 });
        assert_eq!(windows(gemma2), [None, Some(3)]);
    }

    /// As in transformers, an odd number of elements is rounded up to pairs.
    #[test]
    fn a_part_of_a_head_is_rotated_in_phi3() {
        for (part, rotated, pairs) in [(1.0, 16, 8), (0.5, 8, 4), (0.35, 5, 3)] {
            let config = read(json!({
                "model_type": "phi3", "pad_token_id": 0,
                "rope_parameters": { "partial_rotary_factor": part }
            }));
            let config = config.expect("a model");
            assert_eq!((config.rope.rotated, config.rope.pairs()), (rotated, pairs));
            let written = config.to_json().expect("its keys");
            assert_eq!(written["partial_rotary_factor"], json!(part));
            assert_eq!(DecoderConfig::from_json(&written.to_string()).expect("a model"), config);
        }
    }

    #[test]
    fn an_export_with_changed_fields_keeps_the_part_of_a_head() {
        let part = json!({ "rope_type": "default", "partial_rotary_factor": 0.5 });
        for rope in [
            json!({ "partial_rotary_factor": 0.5 }),
            json!({ "rope_parameters": part }),
            json!({ "rope_scaling": part }),
            json!({ "rope_parameters": part, "rope_scaling": part }),
            json!({
                "partial_rotary_factor": 0.5, "rope_parameters": { "partial_rotary_factor": null }
            }),
        ] {
            let mut file = json!({ "model_type": "phi3", "pad_token_id": 0 });
            file.as_object_mut().expect("an object").append(&mut object(&rope));
            let mut config = read(file).expect("a model");
            config.intermediate_size = 96;
            let written = config.to_json().expect("its keys");
            assert_eq!(written["partial_rotary_factor"], json!(0.5), "{rope}");
            assert_eq!(DecoderConfig::from_json(&written.to_string()).expect("a model"), config);
        }
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
        assert_eq!(
            DecoderConfig::from_json(&old.to_json().expect("its keys").to_string())
                .expect("a model"),
            old
        );
    }

    #[test]
    fn wavelengths_may_be_scaled_under_either_name() {
        let linear = read(json!({ "rope_parameters": { "rope_type": "linear", "factor": 2 } }));
        let linear = linear.expect("a model");
        assert_eq!(linear.rope.scaling, RopeScaling::Linear(2.0));
        for other in [
            json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }),
            json!({ "rope_scaling": { "type": "linear", "rope_type": "linear", "factor": 2.0 } }),
            json!({ "rope_theta": 1e4, "rope_scaling": { "rope_type": "linear", "factor": 2.0 } }),
        ] {
            assert_eq!(read(other.clone()).expect("a model"), linear, "{other}");
        }
        assert_eq!(
            DecoderConfig::from_json(&linear.to_json().expect("its keys").to_string())
                .expect("a model"),
            linear
        );
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
                DecoderConfig::from_json(&config.to_json().expect("its keys").to_string())
                    .expect("a model"),
                config
            );
        }
    }

    #[test]
    fn keys_that_change_nothing_are_taken() {
        // SmolLM, a Llama of 2023 and transformers 4 write these keys.
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
            "head_dim": null, "tie_last_hidden_states": true,
        });
        assert_eq!(read(harmless).expect("a model"), read(json!({})).expect("a model"));
    }

    #[test]
    fn an_unknown_key_whose_value_is_null_counts_as_absent() {
        let config = read(json!({ "sliding_window": null, "rope_scaling": { "beta_fast": null } }));
        assert_eq!(config.expect("a model"), read(json!({})).expect("a model"));
    }

    /// Tests a model with other sizes or position embeddings than in its text.
    #[test]
    fn an_export_has_the_fields_that_were_changed() {
        let change = |config: &mut DecoderConfig| {
            config.vocab_size = 128;
            config.intermediate_size = 96;
            config.num_key_value_heads = 2;
            config.rms_norm_eps = 0.1 + 0.2;
            config.rope.theta = 5e5;
            config.max_position_embeddings = 4096;
            config.pad_token_id = None;
            config.initializer_range = 0.5;
        };
        let nested = json!({ "rope_type": "default", "rope_theta": 1e4 });
        for (family, rope) in [
            ("llama", json!({})),
            ("llama", json!({ "rope_type": "linear", "factor": 2 })),
            ("qwen2", nested.clone()),
            ("gemma2", nested.clone()),
            ("smollm3", nested),
            ("phi3", json!({ "rope_theta": 1e4, "partial_rotary_factor": 0.5 })),
        ] {
            let text = json!({
                "model_type": family, "num_key_value_heads": 4, "pad_token_id": 0,
                "rope_parameters": rope
            });
            let read = read(text).expect("a model");
            let before = read.to_json().expect("its keys");
            let mut changed = read.clone();
            change(&mut changed);
            if family != "phi3" {
                changed.rope.scaling = RopeScaling::Linear(4.0);
            }
            let written = changed.to_json().expect("its keys");
            assert_eq!(ConfigFile::of(object(&written)).expect("a model").config, changed);
            assert_eq!(written["max_position_embeddings"], 4096);
            changed.rope.scaling = RopeScaling::Default;
            let written = changed.to_json().expect("its keys");
            assert_eq!(ConfigFile::of(object(&written)).expect("a model").config, changed);
            assert_eq!(ConfigFile::of(object(&before)).expect("a model").config, read);
            assert_eq!(before.get("head_dim"), None, "a key that nothing needs");
        }
    }

    fn object(json: &Value) -> Map<String, Value> {
        json.as_object().expect("an object").clone()
    }

    #[test]
    fn an_export_refuses_fields_that_its_keys_do_not_describe() {
        let config = read(json!({})).expect("a model");
        let refused = |change: fn(&mut DecoderConfig)| {
            let mut changed = config.clone();
            change(&mut changed);
            changed.to_json().expect_err("another model").to_string()
        };
        let told = refused(|config| {
            config.layers[1].window = Some(8);
            config.activation = Activation::GeluTanh;
            config.max_position_embeddings = 4096;
        });
        assert_eq!(told, "no config.json of this family has the changed layers, activation");
        let told = refused(|config| config.num_key_value_heads = 3);
        assert_eq!(told, "num_key_value_heads is 3: it must be a divisor of 4 heads");
        assert!(refused(|config| config.rms_norm_eps = f64::NAN).starts_with("rms_norm_eps: "));
    }

    /// An export does not contain the code that `auto_map` names.
    #[test]
    fn an_export_names_no_code() {
        let map = json!({ "AutoConfig": "configuration_phi3.Phi3Config" });
        let phi3 = json!({
            "model_type": "phi3", "pad_token_id": 0, "auto_map": map, "torch_dtype": "bfloat16"
        });
        let written = read(phi3).expect("a model").to_json().expect("its keys");
        assert_eq!((written.get("auto_map"), written.get("torch_dtype")), (None, None));
        assert_eq!(written["dtype"], "float32");
    }

    #[test]
    fn position_embeddings_of_layers_that_the_model_lacks_are_left_out() {
        let ropes = |has: &[usize]| {
            let config = read(json!({
                "model_type": "smollm3", "pad_token_id": 0, "no_rope_layers": has,
                "num_key_value_heads": 4
            }))?;
            Ok::<_, String>(config.layers.iter().map(|layer| layer.rope).collect::<Vec<_>>())
        };
        assert_eq!(ropes(&[0, 1, 0, 0]).expect("a model"), [false, true]);
        assert_eq!(ropes(&[1, 0]).expect("a model"), [true, false]);
        let refused = ropes(&[1]).expect_err("a layer without an entry");
        assert!(refused.contains("no_rope_layers has 1 entries"), "{refused}");
    }

    /// A file may have names or values of megabytes, or characters that end a line.
    #[test]
    fn a_refusal_is_one_short_line() {
        let huge = "x\n".repeat(1 << 20);
        let twice = json!(huge).to_string();
        let twice = format!("{{{twice}: 1, {twice}: 2}}");
        let twice = DecoderConfig::from_json(&twice).expect_err("no model").to_string();
        assert!(twice.contains("...` is there twice at line 1 column "), "{}", twice.len());
        let refused = [
            json!({ "model_type": huge }),
            json!({ huge.clone(): 1 }),
            json!({ "rope_scaling": { huge.clone(): 1 } }),
            json!({ "hidden_size": huge }),
            json!({ "hidden_act": huge }),
            json!({ "dtype": huge }),
            json!({ "dtype": huge, "torch_dtype": "float32" }),
            json!({ "architectures": [huge] }),
            json!({ "torchscript": huge }),
            json!({ "quantization_config": { huge.clone(): 1 } }),
            json!({ "rope_scaling": { "type": huge } }),
            json!({ "rope_scaling": { "type": huge, "rope_type": "default" } }),
            json!({ "model_type": "qwen2", "layer_types": [huge, huge] }),
            json!({ "rope_theta": -1e308 }),
        ];
        let refused = refused.into_iter().map(|changes| read(changes).expect_err("no model"));
        for line in refused.chain([twice]) {
            assert!(line.len() < 350 && line.contains("..."), "{} bytes", line.len());
            assert_eq!(line.lines().count(), 1, "{line}");
        }
    }

    #[test]
    fn other_models_are_refused_by_name() {
        for (changes, said) in [
            (
                json!({ "rope_parameters": { "rope_type": "yarn", "factor": 2 } }),
                "rope_type is yarn: only default, linear or llama3 is supported",
            ),
            (
                json!({ "rope_scaling": { "type": "dynamic", "factor": 2 } }),
                "rope_type is dynamic: only default, linear or llama3 is supported",
            ),
            (
                json!({ "model_type": "phi3", "pad_token_id": 0,
                    "rope_scaling": { "type": "longrope", "short_factor": [1], "long_factor": [1] } }),
                "rope_type is longrope: only default is supported",
            ),
            (json!({ "attention_dropout": 0.1 }), "attention_dropout is 0.1: only 0 is supported"),
            (
                json!({ "hidden_act": "gelu" }),
                "hidden_act is gelu: only silu or gelu_pytorch_tanh is supported",
            ),
            (
                json!({ "model_type": "gemma2", "use_bidirectional_attention": true }),
                "use_bidirectional_attention is true: only false is supported",
            ),
            (
                json!({ "model_type": "gemma2", "final_logit_softcapping": 0 }),
                "final_logit_softcapping is 0: it must be above 0",
            ),
            (
                json!({ "model_type": "gemma2", "query_pre_attn_scalar": 0 }),
                "query_pre_attn_scalar is 0: it must be above 0",
            ),
            (
                json!({ "model_type": "phi3", "pad_token_id": 0, "resid_pdrop": 0.1 }),
                "resid_pdrop is 0.1: only 0 is supported",
            ),
            (
                json!({ "model_type": "phi3", "pad_token_id": 0, "partial_rotary_factor": 1.5 }),
                "partial_rotary_factor is 1.5: it must be above 0 and at most 1",
            ),
            (
                json!({ "model_type": "phi3" }),
                "pad_token_id is 32000: it must be from -96 to below 96, the vocab_size",
            ),
            (
                json!({ "model_type": "mistral", "sliding_window": 0 }),
                "sliding_window is 0: it must be from 1 to 16777216",
            ),
            (
                json!({
                    "model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]
                }),
                "layer_types is chunked_attention: \
                 only full_attention or sliding_attention is supported",
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
                json!({ "head_dim": 1 << 23 }),
                "head_dim is 8388608: it must be at most 16777216 by the number of heads, 4",
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
            (
                // transformers cannot run it, although no layer has the window.
                json!({
                    "model_type": "gemma2", "sliding_window": null,
                    "layer_types": ["full_attention", "full_attention"]
                }),
                "sliding_window: invalid type: null, expected usize",
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
        for (model_type, value) in [(json!("mixtral"), "mixtral"), (json!(null), "missing")] {
            let refused = read(json!({ "model_type": model_type })).expect_err("another family");
            let said = format!("model_type is {value}: only llama, mistral, ");
            assert!(refused.starts_with(&said), "{refused}");
        }
        for (text, said) in [
            ("", "EOF while parsing a value at line 1 column 0"),
            ("[]", "it is no JSON object"),
            ("{}", "model_type is missing: only llama, mistral, "),
            (r#"{"vocab_size": 8, "vocab_size": 8}"#, "`vocab_size` is there twice at line"),
            (r#"{"rope_scaling": {"type": "x", "type": "y"}}"#, "`type` is there twice at line"),
        ] {
            let refused = DecoderConfig::from_json(text).expect_err("no model").to_string();
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
                // transformers uses the theta of `rope_scaling`, which has its default.
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
                json!({ "rope_scaling": { "type": "llama3", "factor": 2, "low_freq_factor": 1 } }),
                "rope_scaling.rope_type is llama3, and rope_scaling.high_freq_factor is missing",
            ),
            (
                json!({ "model_type": "phi3", "pad_token_id": 0, "partial_rotary_factor": 0.5,
                    "rope_parameters": { "partial_rotary_factor": 1.0 } }),
                "rope_parameters.partial_rotary_factor is 1, and partial_rotary_factor is 0.5",
            ),
            (
                json!({ "model_type": "qwen3", "layer_types": ["full_attention"] }),
                "num_hidden_layers is 2, and layer_types has 1 entries",
            ),
            (
                json!({
                    "model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]
                }),
                "layer 1 has sliding_attention, and use_sliding_window is false",
            ),
            (
                json!({
                    "model_type": "smollm3", "pad_token_id": 0, "num_key_value_heads": 4,
                    "use_sliding_window": true,
                    "layer_types": ["full_attention", "sliding_attention"]
                }),
                "layer 1 has sliding_attention, and there is no sliding_window",
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
