//! Models: bundled ones, those in files (PLAN.md), and decoders of transformers.

mod file;

use std::collections::{HashMap, HashSet};
use std::iter;
use std::path::{Path, PathBuf};

use hsdp_models::decoder::{Decoder, DecoderConfig, Lora};
use hsdp_sharding::{ByteCount, DType, ModelSpec, Param, Unit};
use hsdp_simulator::{
    AttentionScores, AttentionShape, Computation, Error, Hints, Machine, is_attention, is_lookup,
};
use hsdp_train::file::{FileError, read_text};
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Maximum number of bytes of a file.
const MAX_MODEL_BYTES: u64 = 16 << 20;

/// Name of the file of a folder of transformers that describes its model.
const CONFIG: &str = "config.json";

/// A model with its parameters and further facts that its computation depends on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    pub(crate) spec: ModelSpec,
    /// Attentions by the name of the unit.
    attentions: HashMap<String, AttentionShape>,
    /// Names of parameters with rows that are looked up.
    lookups: HashSet<String>,
    /// Names of parameters that the computation reads once more, after the last unit, without a tie
    /// in `spec`. Each is the matrix of a product there.
    again: Vec<String>,
    /// Maximum number of tokens of a sequence, if the description states one.
    most_tokens: Option<usize>,
}

/// Adapters (LoRA) of a decoder, which is frozen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adapters {
    pub(crate) rank: usize,
    /// Dtype of the frozen parameters, if they have no f32 master.
    pub(crate) frozen_in: Option<DType>,
}

impl Model {
    /// Returns the bundled model of this name, or the model in the file or folder of this name,
    /// with adapters if there are any.
    ///
    /// # Errors
    /// A text of one line, if there is none, or if it has no place for adapters because it is no
    /// decoder.
    pub(crate) fn find(name: &str, adapters: Option<Adapters>) -> Result<Self, String> {
        if let Some(model) = bundled_model(name, adapters) {
            return model.map_err(|problem| format!("{name}: {problem}"));
        }
        let path = Self::file(name);
        let text = read_text(&path, MAX_MODEL_BYTES).map_err(|error| match error {
            FileError::Io { .. } => {
                let bundled = BUNDLED.join(", ");
                format!("{error}; a model is a file, a folder of transformers, or one of {bundled}")
            }
            error => error.to_string(),
        })?;
        let read = match path != Path::new(name) || is_config(&text) {
            true => read_decoder(&text, adapters),
            false => no_adapters(adapters).and_then(|()| file::read(&text)),
        };
        read.map_err(|problem| format!("{}: {problem}", path.display()))
    }

    /// Returns the path of the file that describes the model of this name, if it is not bundled.
    pub(crate) fn file(name: &str) -> PathBuf {
        let path = Path::new(name);
        if path.is_dir() { path.join(CONFIG) } else { path.to_owned() }
    }

    /// Finds lookups and attentions by the names of parameters. The units with attention get
    /// `attentions`, one after the other.
    fn by_names(spec: ModelSpec, attentions: impl IntoIterator<Item = AttentionShape>) -> Self {
        let units = spec.units().iter().filter(|unit| unit.params.iter().any(is_attention));
        let attentions = units.map(|unit| unit.name.clone()).zip(attentions).collect();
        let lookups = spec.params().map(|(_, param)| param).filter(|param| is_lookup(param));
        let lookups = lookups.map(|param| param.name.clone()).collect();
        Self { spec, attentions, lookups, ..Self::default() }
    }

    /// Checks that the model reads sequences of this length.
    ///
    /// # Errors
    /// A text of one line, if it does not.
    pub(crate) fn check_context(&self, tokens: u64) -> Result<(), String> {
        match self.most_tokens {
            Some(most) if tokens > most as u64 => {
                Err(format!("--context {tokens}: the model reads at most {most} tokens"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the model's computation.
    ///
    /// # Errors
    /// The errors of [`Computation::of`].
    pub(crate) fn computation(&self) -> Result<Computation, Error> {
        let lookup = |param: &Param| self.lookups.contains(&param.name);
        let attention = |unit: &Unit| self.attentions.get(&unit.name).copied();
        let again = self.again.iter().map(|name| (format!("{name} again"), name));
        let spec = again.fold(self.spec.clone(), |spec, (alias, name)| spec.tie(alias, name));
        Computation::of(&spec, &Hints { lookup: &lookup, attention: &attention })
    }
}

/// Refuses adapters for a model that is no decoder of transformers.
fn no_adapters(adapters: Option<Adapters>) -> Result<(), String> {
    match adapters {
        None => Ok(()),
        Some(_) => Err("--lora needs a decoder of transformers".to_owned()),
    }
}

/// Names of the bundled models.
const BUNDLED: [&str; 3] = ["gpt2-small", "llama3-8b", "llama3-70b"];

/// Returns the model of this name, if it is bundled.
fn bundled_model(name: &str, adapters: Option<Adapters>) -> Option<Result<Model, String>> {
    let config = match name {
        "gpt2-small" => return Some(no_adapters(adapters).map(|()| gpt2_small())),
        "llama3-8b" => include_str!("model/llama3-8b.json"),
        "llama3-70b" => include_str!("model/llama3-70b.json"),
        _ => return None,
    };
    Some(read_decoder(config, adapters))
}

/// Describes GPT-2. The head is the embedding. A parameter is in one unit, so the unit `root` has
/// both, and is kept.
fn gpt2_small() -> Model {
    const WIDTH: usize = 768;
    let root = Unit::new("root")
        .param(Param::new("wte.weight", [50_257, WIDTH]))
        .param(Param::new("wpe.weight", [1024, WIDTH]))
        .param(Param::new("ln_f.weight", [WIDTH]))
        .param(Param::new("ln_f.bias", [WIDTH]))
        .keep();
    let spec = (0..12).fold(ModelSpec::new().unit(root), |spec, layer| {
        spec.unit(gpt2_block(&format!("h.{layer}"), WIDTH))
    });
    let attention = AttentionShape { heads: 12, size: 64, scores: AttentionScores::Fused };
    Model::by_names(spec.tie("lm_head.weight", "wte.weight"), iter::repeat(attention))
}

/// Describes a block. The rows of matrices are inputs, as in the published model.
fn gpt2_block(name: &str, width: usize) -> Unit {
    let matrices = [
        ("attn.c_attn", [width, 3 * width]),
        ("attn.c_proj", [width, width]),
        ("mlp.c_fc", [width, 4 * width]),
        ("mlp.c_proj", [4 * width, width]),
    ];
    let norms = ["ln_1", "ln_2"].into_iter().fold(Unit::new(name), |unit, norm| {
        unit.param(Param::new(format!("{name}.{norm}.weight"), [width]))
            .param(Param::new(format!("{name}.{norm}.bias"), [width]))
    });
    matrices.into_iter().fold(norms, |unit, (matrix, shape)| {
        unit.param(Param::new(format!("{name}.{matrix}.weight"), shape))
            .param(Param::new(format!("{name}.{matrix}.bias"), [shape[1]]))
    })
}

/// Keys that distinguish a `config.json` from a model of `PLAN.md`.
#[derive(Deserialize)]
struct DistinguishingKeys {
    model_type: Option<IgnoredAny>,
    units: Option<IgnoredAny>,
}

/// Returns whether a text is a `config.json`, and no model of `PLAN.md`. Both readers refuse a text
/// that is no JSON.
fn is_config(text: &str) -> bool {
    match serde_json::from_str::<DistinguishingKeys>(text) {
        Ok(DistinguishingKeys { model_type, units }) => model_type.is_some() && units.is_none(),
        Err(_) => text.contains("\"model_type\"") && !text.contains("\"units\""),
    }
}

/// Reads a model of the families of `hsdp-models`, with the units and names that it has in
/// training.
///
/// # Errors
/// A text of one line, with the key.
fn read_decoder(text: &str, adapters: Option<Adapters>) -> Result<Model, String> {
    let config = DecoderConfig::from_json(text).map_err(|error| error.to_string())?;
    let decoder = adapted(Decoder::new(config), adapters);
    let spec = decoder.spec().map_err(|error| error.to_string())?;
    let config = decoder.config();
    let attentions = config.layers.iter().map(|layer| AttentionShape {
        heads: config.num_attention_heads,
        size: config.head_dim,
        scores: layer.window.map_or(AttentionScores::Fused, AttentionScores::Window),
    });
    let mut model = Model::by_names(spec, attentions);
    model.most_tokens = Some(config.max_position_embeddings);
    if config.tie_word_embeddings {
        // The head reads the embedding, the only lookup.
        model.again = model.lookups.iter().cloned().collect();
    }
    Ok(model)
}

fn adapted(decoder: Decoder, adapters: Option<Adapters>) -> Decoder {
    let Some(Adapters { rank, frozen_in }) = adapters else { return decoder };
    let decoder = decoder.with_lora(Lora::of_rank(rank));
    match frozen_in {
        Some(dtype) => decoder.storing_frozen_in(dtype),
        None => decoder,
    }
}

/// Maximum number of bytes in a machine file.
const MAX_MACHINE_BYTES: u64 = 1 << 20;

/// Returns the bundled machine of this name, or the machine in the file of this name.
///
/// # Errors
/// A text of one line, if there is none, or its numbers are impossible.
pub(crate) fn find_machine(name: &str) -> Result<Machine, String> {
    if Machine::BUNDLED.contains(&name) {
        return Machine::bundled(name).map_err(|error| error.to_string());
    }
    let text = read_text(Path::new(name), MAX_MACHINE_BYTES).map_err(|error| match error {
        FileError::Io { .. } => {
            format!("{error}; a machine is a file, or one of {}", Machine::BUNDLED.join(", "))
        }
        error => error.to_string(),
    })?;
    Machine::from_toml(&text).map_err(|error| format!("{name}: {error}"))
}

/// Returns the memory of a rank: its card's, or its part of the host's.
pub(crate) fn memory_of(machine: &Machine, ranks: usize) -> ByteCount {
    let sharing = if machine.device().is_some() { 1.0 } else { ranks as f64 };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of memory")]
    let bytes = (machine.memory.capacity.value() / sharing) as u64;
    ByteCount(bytes)
}
