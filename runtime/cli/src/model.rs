//! Models: bundled ones, those in files (PLAN.md), and decoders of transformers.

mod bundled;
mod decoder;
mod file;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use hsdp_sharding::{DType, ModelSpec, Param, Unit};
use hsdp_simulator::{Attention, Computation, Error, Hints, is_attention, is_lookup};
use hsdp_train::file::{FileError, read_text};

/// Maximum number of bytes of a file.
const MAX_BYTES: u64 = 16 << 20;

/// Name of the file of a folder of transformers that describes its model.
const CONFIG: &str = "config.json";

/// A model with its parameters and further facts that its computation depends on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    pub(crate) spec: ModelSpec,
    /// Attentions by the name of the unit.
    attentions: HashMap<String, Attention>,
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
        if let Some(model) = bundled::find(name, adapters) {
            return model.map_err(|problem| format!("{name}: {problem}"));
        }
        let path = Self::file(name);
        let text = read_text(&path, MAX_BYTES).map_err(|error| match error {
            FileError::Io { .. } => {
                let bundled = bundled::NAMES.join(", ");
                format!("{error}; a model is a file, a folder of transformers, or one of {bundled}")
            }
            error => error.to_string(),
        })?;
        let read = match path != Path::new(name) || decoder::is_config(&text) {
            true => decoder::read(&text, adapters),
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
    fn by_names(spec: ModelSpec, attentions: impl IntoIterator<Item = Attention>) -> Self {
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
