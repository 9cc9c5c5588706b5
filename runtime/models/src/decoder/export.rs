//! A trained model as a folder of transformers, with adapters as a folder of PEFT.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hsdp_candle::Error as AdapterError;
use hsdp_sharding::Param;
use hsdp_train::file::{self, FileError, replace_at, replace_with};
use hsdp_train::stderr::in_one_line;
use safetensors::{Dtype, View};
use serde_json::{Value, json};

use super::config::{DecoderConfig, DecoderConfigError};
use super::layers::{self, Lora};
use super::model::Decoder;
use super::pretrained::Pretrained;

const CONFIG: &str = "config.json";
const MODEL: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const ADAPTERS: &str = "adapters.safetensors";

/// Folder of PEFT in that of an export. `adapter_config.json` beside `config.json` would be taken
/// for a part of the model.
const PEFT: &str = "peft";
const PEFT_CONFIG: &str = "peft/adapter_config.json";
const PEFT_ADAPTERS: &str = "peft/adapter_model.safetensors";

/// Files of the model's folder that are copied if they exist: all that transformers reads for
/// texts and their generation.
const COPIED: [&str; 10] = [
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Folder in that of the model, from which the files `*.jinja` are copied.
const TEMPLATES: &str = "additional_chat_templates";

/// Maximum number of bytes of a file that is copied.
const MAX_COPIED: u64 = 256 << 20;

/// A folder to write a trained model to, which transformers and candle read: `config.json`,
/// `model.safetensors` in f32, and copies of the following files of the folder that the model came
/// from. With adapters the model is as it was, and they are in `adapters.safetensors`, and in the
/// folder `peft` as PEFT reads them.
///
/// | copied | files |
/// |---|---|
/// | tokenizer | `tokenizer.json`, `tokenizer.model`, `tekken.json`, `vocab.json`, `merges.txt` |
/// | its settings | `tokenizer_config.json`, `added_tokens.json`, `special_tokens_map.json` |
/// | templates of chats | `chat_template.jinja`, `additional_chat_templates/*.jinja` |
/// | generation | `generation_config.json` |
///
/// ```no_run
/// # use hsdp::ShardedModel;
/// # use hsdp_models::decoder::{Decoder, Export, Pretrained};
/// let from = Pretrained::open("TinyLlama".as_ref())?;
/// let decoder = Decoder::new(from.config().clone());
/// let export = Export::prepare("tuned".as_ref(), Some(&from), &decoder)?;
/// # let trained = |_: &Pretrained| -> Option<ShardedModel> { None };
/// let model = trained(&from).expect("a model");
/// let parameters = model.full_parameters()?; // collective
/// if model.rank().index() == 0 {
///     export.write(&parameters)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Export {
    folder: PathBuf,
    /// Files beside those of tensors.
    files: Vec<(String, Vec<u8>)>,
    adapters: Vec<Param>,
    /// Parameters that are not of adapters.
    model: Vec<Param>,
}

/// The reason why a model cannot be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The folder cannot be made or read.
    #[error("{}: {source}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The folder is the one that the model came from.
    #[error("{}: it is the folder of the model", folder.display())]
    IsSource {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder holds a file that would be read with the export, or in its place.
    #[error("{}: it holds {name}, of another model", folder.display())]
    Stale {
        /// The folder.
        folder: PathBuf,
        /// The name of the file.
        name: String,
    },
    /// The fields of the config were changed, and `config.json` has no keys for their values.
    #[error(transparent)]
    Config(#[from] DecoderConfigError),
    /// The model cannot be described.
    #[error(transparent)]
    Model(#[from] AdapterError),
    /// A file that is copied cannot be read.
    #[error(transparent)]
    Read(FileError),
    /// A file or the folder of PEFT cannot be written. It is as it was before.
    #[error("cannot write {0}")]
    Write(#[source] FileError),
    /// A parameter is missing, or has another number of elements.
    #[error("parameter {name} is not among those to export, with its {elements} elements")]
    Missing {
        /// The name of the parameter.
        name: String,
        /// Number of its elements.
        elements: usize,
    },
}

impl Export {
    /// Makes the folder, and reads the files that are copied to it from the folder `from`, if the
    /// model came from one. An output that cannot be written is found here, before the model is
    /// trained. Files that exist stay as they are until [`write`](Self::write).
    ///
    /// # Errors
    /// [`ExportError`].
    pub fn prepare(
        folder: &Path,
        from: Option<&Pretrained>,
        decoder: &Decoder,
    ) -> Result<Self, ExportError> {
        let config = decoder.config();
        let recorded = decoder.recorded()?;
        let failed = |source| ExportError::Folder { folder: folder.to_owned(), source };
        fs::create_dir_all(folder).map_err(failed)?;
        let base = folder.canonicalize().map_err(failed)?;
        if from.is_some_and(|from| from.path().canonicalize().is_ok_and(|from| from == base)) {
            return Err(ExportError::IsSource { folder: folder.to_owned() });
        }
        let (adapters, model): (Vec<_>, Vec<_>) =
            recorded.params().cloned().partition(|param| layers::is_adapter(&param.name));
        let bytes = |json: Value| format!("{json:#}").into_bytes();
        let mut files = from.map_or_else(|| Ok(Vec::new()), |from| copied(from.path()))?;
        if let Some(name) = stale(folder, config, &files).map_err(failed)? {
            return Err(ExportError::Stale { folder: folder.to_owned(), name });
        }
        files.push((CONFIG.to_owned(), bytes(config.to_json()?)));
        if let Some(lora) = config.lora {
            files.push((PEFT_CONFIG.to_owned(), bytes(peft_config(lora, &adapters, &base))));
        }
        let tensors = config.lora.map(|_| [ADAPTERS, PEFT_ADAPTERS]);
        let tensors = tensors.into_iter().flatten().chain([MODEL]);
        for name in files.iter().map(|(name, _)| name.as_str()).chain(tensors) {
            let path = folder.join(name);
            // A folder in this one is made when it is written, if it does not exist yet.
            if path.parent().is_some_and(|it| it.symlink_metadata().is_ok()) {
                file::Output::check(&path, &[]).map_err(ExportError::Write)?;
            }
        }
        Ok(Self { folder: folder.to_owned(), files, adapters, model })
    }

    /// Writes the files, each as a whole. The weights come last.
    ///
    /// # Errors
    /// [`ExportError::Missing`] before anything is written. After another [`ExportError`], the
    /// files that were written before it stay.
    pub fn write(&self, parameters: &BTreeMap<String, Vec<f32>>) -> Result<(), ExportError> {
        let [own, peft]: [fn(&str) -> String; 2] = [str::to_owned, peft_name];
        let mut tensors = Vec::new();
        for (file, params, name) in [
            (ADAPTERS, &self.adapters, own),
            (PEFT_ADAPTERS, &self.adapters, peft),
            (MODEL, &self.model, own),
        ] {
            let views = params.iter().map(|param| {
                let values = parameters.get(&param.name);
                match values.filter(|values| values.len() == param.numel()) {
                    Some(values) => {
                        Ok((name(&param.name), TensorView { shape: &param.shape, values }))
                    }
                    None => Err(ExportError::Missing {
                        name: param.name.clone(),
                        elements: param.numel(),
                    }),
                }
            });
            tensors.push((file, views.collect::<Result<Vec<_>, _>>()?));
        }
        tensors.retain(|(_, views)| !views.is_empty());
        for (name, bytes) in &self.files {
            let path = self.folder.join(name);
            if let Some(path) = path.parent() {
                fs::create_dir_all(path).map_err(|source| {
                    ExportError::Write(FileError::Io { path: path.to_owned(), source })
                })?;
            }
            let written = replace_with(&path, |sink| sink.write_all(bytes));
            written.map_err(ExportError::Write)?;
        }
        for (file, views) in tensors {
            let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
            let written = replace_at(&self.folder.join(file), |path| {
                safetensors::serialize_to_file(views, Some(metadata), path)
                    .map_err(io::Error::other)
            });
            written.map_err(ExportError::Write)?;
        }
        Ok(())
    }
}

/// Describes a finished export in a sentence.
impl fmt::Display for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exported to {}", in_one_line(self.folder.display()))?;
        if self.adapters.is_empty() {
            return Ok(());
        }
        write!(
            f,
            ": adapters are in {ADAPTERS}, and not merged into {MODEL}; the folder {PEFT} has them \
             for PEFT"
        )
    }
}

/// Reads the files of the model's folder that are copied.
fn copied(from: &Path) -> Result<Vec<(String, Vec<u8>)>, ExportError> {
    let failed = |source| ExportError::Folder { folder: from.join(TEMPLATES), source };
    let names = COPIED.map(str::to_owned).into_iter().filter(|name| from.join(name).exists());
    let names = names.chain(templates(from).map_err(failed)?);
    names
        .map(|name| {
            let bytes = file::read(&from.join(&name), MAX_COPIED).map_err(ExportError::Read)?;
            Ok((name, bytes))
        })
        .collect()
}

/// Returns the names of the further templates of chats in a model's folder, with their folder.
fn templates(folder: &Path) -> io::Result<Vec<String>> {
    let names = match names(&folder.join(TEMPLATES)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        names => names?,
    };
    let names = names.into_iter().filter(|name| name.ends_with(".jinja"));
    Ok(names.map(|name| format!("{TEMPLATES}/{name}")).collect())
}

/// Returns the names in a folder, sorted.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let names =
        fs::read_dir(folder)?.map(|file| Ok(file?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<io::Result<Vec<String>>>()?;
    names.sort_unstable();
    Ok(names)
}

/// Returns the name of a file in the folder that would be read with the export, or in its place.
/// `copied` are the files that the export replaces.
fn stale(
    folder: &Path,
    config: &DecoderConfig,
    copied: &[(String, Vec<u8>)],
) -> io::Result<Option<String>> {
    let is_stale = |name: &String| {
        let is_part = name.starts_with("model-") && name.ends_with(".safetensors");
        let adapters = (name == ADAPTERS || name == PEFT) && config.lora.is_none();
        let is_kept = (COPIED.contains(&name.as_str()) || name.starts_with(TEMPLATES))
            && !copied.iter().any(|(other, _)| other == name);
        name == INDEX || is_part || adapters || is_kept || name.starts_with("adapter_")
    };
    let names = names(folder)?.into_iter().filter(|name| name != TEMPLATES);
    Ok(names.chain(templates(folder)?).find(is_stale))
}

/// Returns the name of a matrix of an adapter in the file of PEFT.
fn peft_name(parameter: &str) -> String {
    format!("base_model.model.{parameter}")
}

/// Returns the contents of `adapter_config.json` for these matrices. `base` is the folder of the
/// model, from which `AutoPeftModelForCausalLM` reads it.
fn peft_config(lora: Lora, adapters: &[Param], base: &Path) -> Value {
    let layers = adapters.iter().filter_map(|param| param.name.split_once(".lora_"));
    let targets: BTreeSet<&str> =
        layers.filter_map(|(layer, _)| layer.rsplit('.').next()).collect();
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

/// A tensor whose bytes are made when it is written.
struct TensorView<'a> {
    shape: &'a [usize],
    values: &'a [f32],
}

impl View for TensorView<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>().into()
    }

    fn data_len(&self) -> usize {
        size_of_val(self.values)
    }
}
