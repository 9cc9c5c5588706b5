//! The tokens of a text: its characters, or those of the tokenizer of a model.

use std::path::Path;

use hsdp_train::{Digest, file};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::DataError;
use crate::decoder::{DecoderConfig, Pretrained};
use crate::text::Characters;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Maximum number of bytes of a tokenizer.
const MAX_TOKENIZER: u64 = 256 << 20;

/// Maximum number of bytes of `tokenizer_config.json`.
const MAX_CONFIG: u64 = 4 << 20;

/// A text as tokens.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// The tokens, in the order of the text.
    pub ids: Vec<u32>,
    /// Number of different tokens. All tokens are below it.
    pub vocabulary: usize,
    /// A token, in words.
    pub item: &'static str,
    /// Digest of the text, and of the tokenizer if there is one.
    pub digest: Digest,
    /// Differences between the tokenizer and its model that change nothing in training: another
    /// padding token, or more tokens.
    pub warnings: Vec<String>,
}

impl Tokens {
    /// Reads a text whose tokens are its [`Characters`].
    #[must_use]
    pub fn characters(text: &str) -> Self {
        let characters = Characters::of(text);
        let ids = characters.tokens().to_vec();
        let vocabulary = characters.vocabulary();
        let digest = Digest::of(text.as_bytes());
        Self { ids, vocabulary, item: "character", digest, warnings: Vec::new() }
    }

    /// Reads a text by the `tokenizer.json` in the folder of a model, and compares this file and
    /// `tokenizer_config.json` with the model.
    ///
    /// # Errors
    /// [`DataError`]: also if there is no tokenizer, or if it finds a token in the text that the
    /// model does not have.
    pub fn of_folder(model: &Pretrained, text: &str) -> Result<Self, DataError> {
        let folder = model.path();
        let config = model.config();
        let path = folder.join(TOKENIZER);
        if !path.exists() {
            return Err(DataError::NoTokenizer { folder: folder.to_owned() });
        }
        let bytes = file::read(&path, MAX_TOKENIZER)?;
        let mut tokenizer = Tokenizer::from_bytes(&bytes)
            .map_err(|error| DataError::Content { path, problem: error.to_string() })?;
        let warnings = differences(&tokenizer, folder, config)?;
        // A text is one sequence, however long it is.
        let whole = tokenizer.with_truncation(None).map(|it| it.with_padding(None)).map(drop);
        whole.map_err(|error| failed(folder, &*error))?;
        let encoding = tokenizer.encode_fast(text, false);
        let encoding = encoding.map_err(|error| failed(folder, &*error))?;
        let ids = encoding.get_ids().to_vec();
        let vocabulary = config.vocab_size;
        if let Some(token) = ids.iter().copied().find(|token| *token as usize >= vocabulary) {
            let folder = folder.to_owned();
            return Err(DataError::UnknownToken { folder, token, vocabulary });
        }
        let digest = Digest::of(&[text.as_bytes(), &bytes].concat());
        Ok(Self { ids, vocabulary, item: "token", digest, warnings })
    }
}

/// Returns a text for each difference between a tokenizer and its model.
fn differences(
    tokenizer: &Tokenizer,
    folder: &Path,
    config: &DecoderConfig,
) -> Result<Vec<String>, DataError> {
    let mut differences = Vec::new();
    let vocabulary = config.vocab_size;
    let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or_default();
    if largest as usize >= vocabulary {
        differences
            .push(format!("{TOKENIZER} has token {largest}, and the model has {vocabulary}"));
    }
    let padding = tokenizer.get_padding().map(|padding| padding.pad_id);
    let named = pad_token(&folder.join(TOKENIZER_CONFIG))?;
    let named = named.and_then(|token| tokenizer.token_to_id(&token));
    for (file, token) in [(TOKENIZER, padding), (TOKENIZER_CONFIG, named)] {
        let (Some(token), Some(row)) = (token, config.pad_token_id) else { continue };
        if token as usize != row {
            differences.push(format!(
                "{file} pads with token {token}, and pad_token_id is {row} in config.json: \
                 {row} is used"
            ));
        }
    }
    Ok(differences)
}

fn failed(folder: &Path, error: &(dyn std::error::Error + Send + Sync)) -> DataError {
    DataError::Tokenizer { folder: folder.to_owned(), problem: error.to_string() }
}

/// Reads the padding token in `tokenizer_config.json`, if there is one: text, or an object with the
/// text.
fn pad_token(path: &Path) -> Result<Option<String>, DataError> {
    if !path.exists() {
        return Ok(None);
    }
    let text = file::read_text(path, MAX_CONFIG)?;
    let config: Value = serde_json::from_str(&text).map_err(|error| DataError::Content {
        path: path.to_owned(),
        problem: error.to_string(),
    })?;
    let token = &config["pad_token"];
    Ok(token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned))
}
