//! `--export`: the trained model as a folder of transformers.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hsdp_candle::Recorded;
use hsdp_models::decoder::DecoderConfig;
use hsdp_train::file::{self, replace_at, replace_with};
use hsdp_train::stderr::in_one_line;
use safetensors::{Dtype, View};

use super::folder::ModelFolder;
use super::inputs::Inputs;
use super::peft;
use super::shared::failure::Failure;
use super::shared::output::cannot_write_whole;

const CONFIG: &str = "config.json";
const MODEL: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const ADAPTERS: &str = "adapters.safetensors";

/// Files of the model's folder that are copied if they are there.
const COPIED: [&str; 6] = [
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
];

/// The most bytes of a file that is copied.
const MAX_COPIED: u64 = 256 << 20;

/// A folder to write to, and its small files.
#[derive(Debug)]
pub(crate) struct Export {
    folder: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Export {
    /// Makes the folder, and reads the files that are copied to it. An output that cannot be written
    /// is found before the run.
    pub(crate) fn prepare(
        to: &Path,
        from: Option<&ModelFolder>,
        config: &DecoderConfig,
        recorded: &Recorded,
    ) -> Result<Self, Failure> {
        let refuse = |error: &dyn std::fmt::Display| {
            Failure::Input(format!("--export {}: {error}", to.display()))
        };
        fs::create_dir_all(to).map_err(|error| refuse(&error))?;
        if from.is_some_and(|from| is_same(from.path(), to)) {
            return Err(refuse(&"it is the folder of --model"));
        }
        if let Some(stale) = stale(to, config).map_err(|error| refuse(&error))? {
            return Err(refuse(&format_args!("it holds {stale}, of another model")));
        }
        let json = |value| serde_json::to_vec_pretty(&value).map_err(Failure::training);
        let mut files = vec![(CONFIG, json(config.to_json().map_err(|error| refuse(&error))?)?)];
        if let Some(lora) = config.lora {
            fs::create_dir_all(to.join(peft::FOLDER)).map_err(|error| refuse(&error))?;
            let base = to.canonicalize().map_err(|error| refuse(&error))?;
            let names = recorded.params().map(|param| param.name.as_str());
            files.push((peft::CONFIG, json(peft::config(lora, names, &base))?));
        }
        for name in from.map_or(&[][..], |_| &COPIED) {
            if let Some(path) = from.and_then(|from| from.file(name)) {
                files.push((name, file::read(&path, MAX_COPIED).map_err(Failure::input)?));
            }
        }
        let names = files.iter().map(|(name, _)| *name).chain([MODEL]);
        let adapters = config.lora.map(|_| [ADAPTERS, peft::ADAPTERS]);
        for name in names.chain(adapters.into_iter().flatten()) {
            let checked = file::Output::check(&to.join(name), &[]);
            checked.map_err(|error| Failure::Input(format!("cannot write {error}")))?;
        }
        Ok(Self { folder: to.to_owned(), files })
    }

    /// Writes the files, each as a whole. The weights come last.
    pub(crate) fn write(
        &self,
        inputs: &Inputs,
        parameters: &BTreeMap<String, Vec<f32>>,
    ) -> Result<(), Failure> {
        for (name, bytes) in &self.files {
            let written = replace_with(&self.folder.join(name), |sink| sink.write_all(bytes));
            written.map_err(cannot_write_whole)?;
        }
        let (adapters, base): (Vec<_>, Vec<_>) =
            inputs.recorded.params().partition(|param| peft::is_adapter(&param.name));
        let own: fn(&str) -> String = str::to_owned;
        for (file, params, name) in [
            (ADAPTERS, &adapters, own),
            (peft::ADAPTERS, &adapters, peft::name),
            (MODEL, &base, own),
        ] {
            if params.is_empty() {
                continue;
            }
            let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
            let views = params.iter().map(|param| match parameters.get(&param.name) {
                Some(values) => Ok((name(&param.name), Tensor { shape: &param.shape, values })),
                None => Err(Failure::training(format_args!(
                    "parameter {} was not gathered",
                    param.name
                ))),
            });
            let views = views.collect::<Result<Vec<_>, _>>()?;
            let written = replace_at(&self.folder.join(file), |path| {
                safetensors::serialize_to_file(views, Some(metadata), path)
                    .map_err(io::Error::other)
            });
            written.map_err(cannot_write_whole)?;
        }
        Ok(())
    }

    /// Returns a sentence for the report.
    pub(crate) fn in_words(&self, inputs: &Inputs) -> String {
        let folder = in_one_line(self.folder.display());
        match inputs.options.lora {
            None => format!("exported to {folder}"),
            Some(_) => {
                format!(
                    "exported to {folder}: adapters are in {ADAPTERS}, and not merged into {MODEL}; \
                     the folder {} has them for PEFT",
                    peft::FOLDER
                )
            }
        }
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}

/// Returns the name of a file in the folder that would be read with the export, or in its place.
fn stale(folder: &Path, config: &DecoderConfig) -> io::Result<Option<String>> {
    let is_stale = |name: &str| {
        let is_part = name.starts_with("model-") && name.ends_with(".safetensors");
        let adapters = (name == ADAPTERS || name == peft::FOLDER) && config.lora.is_none();
        name == INDEX || is_part || adapters || name.starts_with("adapter_")
    };
    let names =
        fs::read_dir(folder)?.map(|file| Ok(file?.file_name().to_string_lossy().into_owned()));
    let mut stale = names.collect::<io::Result<Vec<String>>>()?;
    stale.retain(|name| is_stale(name));
    Ok(stale.into_iter().min())
}

/// A tensor whose bytes are made when it is written.
struct Tensor<'a> {
    shape: &'a [usize],
    values: &'a [f32],
}

impl View for Tensor<'_> {
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
