//! A model in a folder of Hugging Face.

use std::path::{Path, PathBuf};

use hsdp_models::llama::{LlamaConfig, Pretrained};
use hsdp_program::file;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::shared::failure::Failure;

/// The most bytes of a tokenizer.
const MAX_TOKENIZER: u64 = 256 << 20;

/// The most bytes of `tokenizer_config.json`.
const MAX_CONFIG: u64 = 4 << 20;

/// A folder whose files agree.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    pub(crate) model: Pretrained,
}

impl ModelFolder {
    /// Reads `config.json` and the headers of the tensors.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        Pretrained::open(path).map(|model| Self { model }).map_err(Failure::input)
    }

    pub(crate) fn path(&self) -> &Path {
        self.model.path()
    }

    pub(crate) fn config(&self) -> &LlamaConfig {
        self.model.config()
    }

    /// Reads the tokenizer, and compares it with the model. Returns it with the bytes of its file.
    pub(crate) fn tokenizer(&self) -> Result<(Tokenizer, Vec<u8>), Failure> {
        let path = self.path().join("tokenizer.json");
        if !path.exists() {
            let folder = self.path().display();
            return Err(Failure::Input(format!(
                "{folder} has no tokenizer.json, which --data needs"
            )));
        }
        let refuse = |problem: String| Failure::Input(format!("{}: {problem}", path.display()));
        let bytes = file::read(&path, MAX_TOKENIZER).map_err(Failure::input)?;
        let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| refuse(error.to_string()))?;
        let vocabulary = self.config().vocab_size;
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or_default();
        if largest as usize >= vocabulary {
            return Err(refuse(format!("it has token {largest}: the model has {vocabulary}")));
        }
        if let Some(padding) = tokenizer.get_padding() {
            self.check_padding(padding.pad_id).map_err(refuse)?;
        }
        let config = self.path().join("tokenizer_config.json");
        if let Some(token) = pad_token(&config)?.and_then(|it| tokenizer.token_to_id(&it)) {
            let checked = self.check_padding(token);
            checked
                .map_err(|problem| Failure::Input(format!("{}: {problem}", config.display())))?;
        }
        Ok((tokenizer, bytes))
    }

    /// Checks that a tokenizer pads with the token that the model treats apart, if there is such a token.
    fn check_padding(&self, token: u32) -> Result<(), String> {
        match self.config().pad_token_id {
            Some(row) if row != token as usize => Err(format!(
                "it pads with token {token}, and the pad_token_id of config.json is {row}"
            )),
            _ => Ok(()),
        }
    }

    /// The path of a file of the folder, if it is there.
    pub(crate) fn file(&self, name: &str) -> Option<PathBuf> {
        Some(self.path().join(name)).filter(|path| path.exists())
    }
}

/// The padding token in `tokenizer_config.json`, if there is one: text, or an object with the text.
fn pad_token(path: &Path) -> Result<Option<String>, Failure> {
    if !path.exists() {
        return Ok(None);
    }
    let text = file::read_text(path, MAX_CONFIG).map_err(Failure::input)?;
    let refuse = |error| Failure::Input(format!("{}: {error}", path.display()));
    let config: Value = serde_json::from_str(&text).map_err(refuse)?;
    let token = &config["pad_token"];
    Ok(token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned))
}
