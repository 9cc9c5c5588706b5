//! A model in a folder of transformers, and the comparison of the folder's files.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp::checkpoint::format::{Error as FolderError, LinkedDisk, ReadFiles, listed};
use hsdp::checkpoint::{Folder, Import, Imported};
use hsdp::{DType, Error, ModelOptions, ModelSpec, Param, ShardedModel, World};

use super::config::{ConfigFile, DecoderConfig, DecoderConfigError, keys, padding_row, shown};
use super::layers;
use super::model::Decoder;
use hsdp_candle::Error as AdapterError;

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const LM_HEAD: &str = "lm_head.weight";

/// End of the names of buffers that old versions of transformers stored. The model computes these
/// buffers.
const COMPUTED: &str = ".rotary_emb.inv_freq";

/// Files with adapters of PEFT, or of an export with adapters.
const ADAPTERS: [&str; 4] = [
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapters.safetensors",
];

/// Maximum number of bytes of a JSON file.
const MOST_BYTES: u64 = 4 << 20;

/// Elements of a tied pair that are compared at a time.
const BLOCK: usize = 1 << 16;

/// A folder of transformers with a decoder. Its config, its tensors and the files beside them
/// agree.
///
/// ```no_run
/// # use hsdp::prelude::*;
/// # use hsdp_models::decoder::{Decoder, Pretrained};
/// # fn train(world: World) -> Result<(), Box<dyn std::error::Error>> {
/// let folder = Pretrained::open("TinyLlama".as_ref())?;
/// let decoder = Decoder::new(folder.config().clone());
/// let options = ModelOptions::on(Mesh::new(2, 2)?);
/// let init = decoder.recorded()?.init(1);
/// let model = folder.load(world, decoder.spec()?, options, init)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pretrained {
    path: PathBuf,
    config: DecoderConfig,
    /// Name of the embedding's tensor.
    embedding: &'static str,
    /// Tensors that the model does not need.
    unused: BTreeSet<String>,
    warnings: Vec<String>,
}

/// The error of a folder that holds no decoder, or contradicts itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PretrainedError {
    /// A JSON file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// `config.json` cannot be used.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: DecoderConfigError,
    },
    /// The tensors cannot be read.
    #[error(transparent)]
    Tensors(#[from] FolderError),
    /// Two files of the folder contradict each other.
    #[error("{}: {problem}", path.display())]
    Contradiction {
        /// The folder.
        path: PathBuf,
        /// The contradiction, in words.
        problem: String,
    },
    /// The model cannot be described.
    #[error(transparent)]
    Model(#[from] AdapterError),
    /// The model cannot be loaded.
    #[error(transparent)]
    Load(#[from] Error),
    /// The folder is not the one that was opened.
    #[error("{} has changed since it was opened: {problem}", path.display())]
    Changed {
        /// The folder.
        path: PathBuf,
        /// The difference, in words.
        problem: String,
    },
}

impl Pretrained {
    /// Reads `config.json`, and compares it with the headers of the tensors and with
    /// `generation_config.json`. As in transformers, one stored tensor of a tied pair stands for
    /// both. If both are stored, and `tie_word_embeddings` is true, they are read and compared, and
    /// are tied only if they are equal. Not collective.
    ///
    /// # Errors
    /// [`PretrainedError`]: also if a tensor is missing, has another shape, has no part in the
    /// model, or would lose digits in the dtype of `config.json`, and if adapters are beside the
    /// model.
    pub fn open(path: &Path) -> Result<Self, PretrainedError> {
        let ConfigFile { mut config, dtype } = read_config(path)?;
        let contradiction =
            |problem| PretrainedError::Contradiction { path: path.to_owned(), problem };
        let mut warnings = Vec::from_iter(check_generation(path, &config));
        let folder = Folder::open(Arc::new(LinkedDisk), path)?;
        if let Some(adapters) = ADAPTERS.into_iter().find(|name| path.join(name).exists()) {
            let problem = format!(
                "{adapters} is beside the model, and adapters are not read: merge them into it, \
                 or move them away"
            );
            return Err(contradiction(problem));
        }
        let mut embedding = EMBEDDING;
        let mut unused = BTreeSet::new();
        if config.tie_word_embeddings {
            match (folder.dtype(EMBEDDING), folder.dtype(LM_HEAD)) {
                (Some(_), Some(_)) if are_equal(&folder, &config)? => {
                    unused.insert(LM_HEAD.to_owned());
                }
                (Some(_), Some(_)) => {
                    config.tie_word_embeddings = false;
                    warnings.push(format!(
                        "tie_word_embeddings is true, but {EMBEDDING} and {LM_HEAD} differ: \
                         they are not tied"
                    ));
                }
                (None, Some(_)) => embedding = LM_HEAD,
                (_, None) => {}
            }
        }
        let names = folder.tensors().map(|(name, _)| name);
        unused.extend(names.filter(|name| name.ends_with(COMPUTED)).map(str::to_owned));
        compare(&folder, &config, embedding, &unused)
            .map_err(|problems| contradiction(listed(&problems, "; ")))?;
        check_dtypes(&folder, dtype, &unused).map_err(contradiction)?;
        Ok(Self { path: path.to_owned(), config, embedding, unused, warnings })
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the sizes, with the `tie_word_embeddings` that is true of the tensors.
    #[must_use]
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns the tensors, for [`ShardedModel::import`](hsdp::ShardedModel::import).
    #[must_use]
    pub fn import(&self) -> Import<'static> {
        let embedding = self.embedding;
        Import::of(&self.path).naming(move |name| match name {
            EMBEDDING => embedding.to_owned(),
            other => other.to_owned(),
        })
    }

    /// Makes the sharded model of a decoder with this [`config`](Self::config), perhaps with
    /// adapters: each rank reads its part of the tensors. Adapters have the values of `init`.
    /// **Collective** over the world.
    ///
    /// # Errors
    /// [`PretrainedError::Load`] with the errors of [`ShardedModel::import`], and
    /// [`PretrainedError::Changed`] if a tensor is missing that was in the folder, or one was added
    /// that the model does not need.
    pub fn load(
        &self,
        world: World,
        spec: ModelSpec,
        options: ModelOptions,
        init: impl Fn(&Param) -> Vec<f32> + Send + Sync,
    ) -> Result<ShardedModel, PretrainedError> {
        let imported = ShardedModel::import(world, spec, options, &self.import().or_init(init))?;
        let Imported { model, left_over, initialised } = imported;
        let missing = initialised.into_iter().filter(|name| !layers::is_adapter(name));
        let missing = missing.map(|name| format!("there is no tensor {name}"));
        let added = left_over.into_iter().filter(|name| !self.unused.contains(name));
        let added = added.map(|name| not_of_model(&name));
        let problems = Vec::from_iter(missing.chain(added));
        if problems.is_empty() {
            return Ok(model);
        }
        let path = self.path.clone();
        let problem = listed(&problems, "; ");
        Err(PretrainedError::Changed { path, problem })
    }

    /// Returns a text for each oddity of the folder with which transformers trains: a tied pair
    /// that differs, another padding token in `generation_config.json`, or such a file that cannot
    /// be read.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// Name of the embedding's parameter.
const EMBEDDING: &str = "model.embed_tokens.weight";

fn read_config(folder: &Path) -> Result<ConfigFile, PretrainedError> {
    let path = folder.join(CONFIG);
    let text =
        read_text(&path).map_err(|source| PretrainedError::Io { path: path.clone(), source })?;
    ConfigFile::parse(&text).map_err(|source| PretrainedError::Config { path, source })
}

/// Reads a regular file. A FIFO is an error, not a wait.
fn read_text(path: &Path) -> io::Result<String> {
    let source = LinkedDisk.open(path)?;
    let size = source.size()?;
    if size > MOST_BYTES {
        let problem = format!("it has {size} bytes, more than {MOST_BYTES}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let mut bytes = vec![0; usize::try_from(size).expect("it is small")];
    source.read_at(0, &mut bytes)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Compares the padding token of the file for generations with the model's padding row. Returns a
/// warning if they differ, or if that file cannot be read. transformers trains the model of
/// `config.json` then.
fn check_generation(folder: &Path, config: &DecoderConfig) -> Option<String> {
    let text = match read_text(&folder.join(GENERATION)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => return Some(format!("{GENERATION} cannot be read: {error}")),
    };
    let json = match keys::object(&text) {
        Ok(json) => json,
        Err(error) => return Some(format!("{GENERATION} cannot be read: {error}")),
    };
    let row = config.pad_token_id?;
    let token = json.get("pad_token_id")?;
    let other = token.as_i64().and_then(|token| padding_row(token, config.vocab_size).ok());
    (!token.is_null() && other != Some(row)).then(|| {
        let token = shown(token);
        format!("pad_token_id is {token} in {GENERATION}, and {row} in {CONFIG}: {row} is used")
    })
}

/// Returns whether the two tensors of a tied pair have the same shape and values.
fn are_equal(folder: &Folder, config: &DecoderConfig) -> Result<bool, FolderError> {
    let shapes: BTreeMap<&str, &[u64]> = folder.tensors().collect();
    let one = shapes[EMBEDDING];
    let other = shapes[LM_HEAD];
    let elements = config.vocab_size.checked_mul(config.hidden_size);
    let size = one.iter().try_fold(1_u64, |size, dim| size.checked_mul(*dim));
    // A pair of another shape than the model's is refused later.
    let (Some(elements), true) = (elements, one == other) else { return Ok(false) };
    if size != Some(elements as u64) {
        return Ok(true);
    }
    let mut blocks = [vec![0.0_f32; BLOCK.min(elements)], vec![0.0_f32; BLOCK.min(elements)]];
    for from in (0..elements).step_by(BLOCK) {
        let length = BLOCK.min(elements - from);
        for (name, block) in [EMBEDDING, LM_HEAD].into_iter().zip(&mut blocks) {
            folder.read(name, from as u64, &mut block[..length])?;
        }
        if blocks[0][..length] != blocks[1][..length] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Compares the tensors with those of the model that `config` describes.
///
/// # Errors
/// Describes all differences.
fn compare(
    folder: &Folder,
    config: &DecoderConfig,
    embedding: &str,
    unused: &BTreeSet<String>,
) -> Result<(), Vec<String>> {
    let recorded =
        Decoder::new(config.clone()).recorded().map_err(|error| vec![error.to_string()])?;
    let mut tensors: BTreeMap<&str, &[u64]> = folder.tensors().collect();
    tensors.retain(|name, _| !unused.contains(*name));
    let mut problems = Vec::new();
    for param in recorded.params() {
        let name = if param.name == EMBEDDING { embedding } else { &param.name };
        let shape: Vec<u64> = param.shape.iter().map(|size| *size as u64).collect();
        match tensors.remove(name) {
            None => problems.push(format!("there is no tensor {name}")),
            Some(found) if *found != shape => {
                problems.push(format!("{name} has shape {found:?}, not {shape:?}"));
            }
            Some(_) => {}
        }
    }
    problems.extend(tensors.into_keys().map(not_of_model));
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

fn not_of_model(tensor: &str) -> String {
    format!("tensor {} is not of the model that {CONFIG} describes", tensor.escape_debug())
}

/// Checks that tensors are floats, and that a conversion to the dtype of `config.json`, or else to
/// that of the first tensor, loses no digit. transformers converts all tensors to that dtype.
fn check_dtypes(
    folder: &Folder,
    dtype: Option<DType>,
    unused: &BTreeSet<String>,
) -> Result<(), String> {
    let tensors = folder.tensors().map(|(name, _)| name).filter(|name| !unused.contains(*name));
    let mut first: Option<(&str, String)> = None;
    for name in tensors {
        let Some(stored) = folder.dtype(name).map(|dtype| dtype.to_string()) else { continue };
        let fits: &[DType] = match &*stored {
            "F32" | "F64" => &[DType::F32],
            "BF16" => &[DType::F32, DType::BF16],
            "F16" => &[DType::F32, DType::F16],
            _ => return Err(format!("the elements of {name} are {stored}, not floats")),
        };
        match (dtype, &first) {
            (Some(dtype), _) if !fits.contains(&dtype) => {
                let stated = stated(dtype);
                return Err(format!(
                    "{name} is {stored}, and the dtype of {CONFIG} is {stated}, in which it would \
                     lose digits: make them agree"
                ));
            }
            (None, Some((other, dtype))) if *dtype != stored => {
                return Err(format!(
                    "{other} is {dtype}, {name} is {stored}, and {CONFIG} has no dtype: \
                     add the one that all should have"
                ));
            }
            _ => {}
        }
        first.get_or_insert((name, stored));
    }
    Ok(())
}

/// Returns the name of a dtype in `config.json`.
fn stated(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::BF16 => "bfloat16",
        _ => "float16",
    }
}
