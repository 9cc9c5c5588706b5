//! A model in a folder of transformers.

use std::path::{Path, PathBuf};

use hsdp_models::decoder::{DecoderConfig, Pretrained};
use hsdp_train::file;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::shared::failure::Failure;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Maximum number of bytes of a tokenizer.
const MAX_TOKENIZER: u64 = 256 << 20;

/// Maximum number of bytes of `tokenizer_config.json`.
const MAX_CONFIG: u64 = 4 << 20;

/// A folder with a model that can be trained.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    pub(crate) model: Pretrained,
    /// Oddities that change nothing in training.
    pub(crate) warnings: Vec<String>,
}

impl ModelFolder {
    /// Reads `config.json` and the headers of the tensors.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let model = Pretrained::open(path).map_err(Failure::input)?;
        let warnings = model.warnings().to_vec();
        Ok(Self { model, warnings })
    }

    pub(crate) fn path(&self) -> &Path {
        self.model.path()
    }

    pub(crate) fn config(&self) -> &DecoderConfig {
        self.model.config()
    }

    /// Reads the tokenizer, and compares it with the model. Returns it with the bytes of its file.
    /// Another padding token than the model's is a warning, and so are more tokens.
    pub(crate) fn tokenizer(&mut self) -> Result<(Tokenizer, Vec<u8>), Failure> {
        let path = self.path().join(TOKENIZER);
        if !path.exists() {
            let folder = self.path().display();
            return Err(Failure::Input(format!("{folder} has no {TOKENIZER}, which --data needs")));
        }
        let refuse = |problem: String| Failure::Input(format!("{}: {problem}", path.display()));
        let bytes = file::read(&path, MAX_TOKENIZER).map_err(Failure::input)?;
        let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| refuse(error.to_string()))?;
        let vocabulary = self.config().vocab_size;
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or_default();
        if largest as usize >= vocabulary {
            let what = format!("{TOKENIZER} has token {largest}, and the model has {vocabulary}");
            self.warnings.push(what);
        }
        let padding = tokenizer.get_padding().map(|padding| padding.pad_id);
        let named = pad_token(&self.path().join(TOKENIZER_CONFIG))?;
        let named = named.and_then(|token| tokenizer.token_to_id(&token));
        for (file, token) in [(TOKENIZER, padding), (TOKENIZER_CONFIG, named)] {
            let (Some(token), Some(row)) = (token, self.config().pad_token_id) else { continue };
            if token as usize != row {
                self.warnings.push(format!(
                    "{file} pads with token {token}, and pad_token_id is {row} in config.json: \
                     {row} is used"
                ));
            }
        }
        Ok((tokenizer, bytes))
    }

    /// Returns the path of a file of the folder, if it is there.
    pub(crate) fn file(&self, name: &str) -> Option<PathBuf> {
        Some(self.path().join(name)).filter(|path| path.exists())
    }
}

/// Reads the padding token in `tokenizer_config.json`, if there is one: text, or an object with the
/// text.
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
