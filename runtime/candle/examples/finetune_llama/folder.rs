//! A model in a folder of Hugging Face.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp::checkpoint::Folder;
use hsdp::checkpoint::format::LinkedDisk;
use hsdp_candle::llama::{Llama, LlamaConfig};
use hsdp_program::file;
use serde_json::Value;

use super::shared::failure::Failure;

/// The most bytes of `config.json`.
const MAX_CONFIG: u64 = 4 << 20;

/// A folder, and what its `config.json` says.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    pub(crate) path: PathBuf,
    pub(crate) config: LlamaConfig,
    /// All of `config.json`.
    pub(crate) json: Value,
}

impl ModelFolder {
    /// Reads `config.json`.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let file = path.join("config.json");
        let refuse =
            |error: &dyn std::fmt::Display| Failure::Input(format!("{}: {error}", file.display()));
        let text = file::read_text(&file, MAX_CONFIG).map_err(Failure::input)?;
        let config = LlamaConfig::from_json(&text).map_err(|error| refuse(&error))?;
        let json = serde_json::from_str(&text).map_err(|error| refuse(&error))?;
        Ok(Self { path: path.to_owned(), config, json })
    }

    /// The tokenizer.
    pub(crate) fn tokenizer(&self) -> Result<PathBuf, Failure> {
        let tokenizer = self.path.join("tokenizer.json");
        match tokenizer.exists() {
            true => Ok(tokenizer),
            false => Err(Failure::Input(format!(
                "{} has no tokenizer.json, which --data needs",
                self.path.display()
            ))),
        }
    }

    /// Checks that the folder has a tensor for each parameter that is not of an adapter, before the ranks read them.
    pub(crate) fn check_tensors(&self, base: &Llama) -> Result<(), Failure> {
        let folder = Folder::open(Arc::new(LinkedDisk), &self.path).map_err(Failure::input)?;
        let tensors: BTreeMap<&str, &[u64]> = folder.tensors().collect();
        let recorded = base.recorded()?;
        let problem = recorded.params().find_map(|param| {
            let shape: Vec<u64> = param.shape.iter().map(|size| *size as u64).collect();
            match tensors.get(&*param.name) {
                None => Some(format!("there is no tensor {}", param.name)),
                Some(found) if *found != shape => {
                    Some(format!("{} has shape {found:?}, not {shape:?}", param.name))
                }
                Some(_) => None,
            }
        });
        match problem {
            Some(problem) => Err(Failure::Input(format!("{}: {problem}", self.path.display()))),
            None => Ok(()),
        }
    }
}
