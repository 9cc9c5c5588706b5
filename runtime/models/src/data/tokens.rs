//! The tokens of a text: its characters, or those of the tokenizer of a model.

use std::path::{Path, PathBuf};

use hsdp_train::{Digest, file};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::DataError;
use crate::decoder::Pretrained;
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
}

impl Tokens {
    /// Reads a text whose tokens are its [`Characters`].
    #[must_use]
    pub fn characters(text: &str) -> Self {
        let characters = Characters::of(text);
        let (ids, vocabulary) = (characters.tokens().to_vec(), characters.vocabulary());
        Self { ids, vocabulary, item: "character", digest: Digest::of(text.as_bytes()) }
    }
}

/// The tokenizer of a folder of transformers, compared with its model.
#[derive(Debug)]
pub struct FolderTokenizer {
    tokenizer: Tokenizer,
    /// Bytes of its file.
    bytes: Vec<u8>,
    folder: PathBuf,
    /// Number of tokens of the model.
    vocabulary: usize,
    warnings: Vec<String>,
}

impl FolderTokenizer {
    /// Reads `tokenizer.json`, and compares it and `tokenizer_config.json` with the model.
    ///
    /// # Errors
    /// [`DataError`]: [`NoTokenizer`](DataError::NoTokenizer) if there is none.
    pub fn open(model: &Pretrained) -> Result<Self, DataError> {
        let (folder, config) = (model.path(), model.config());
        let path = folder.join(TOKENIZER);
        if !path.exists() {
            return Err(DataError::NoTokenizer { folder: folder.to_owned() });
        }
        let bytes = file::read(&path, MAX_TOKENIZER)?;
        let mut tokenizer = Tokenizer::from_bytes(&bytes)
            .map_err(|error| DataError::Content { path, problem: error.to_string() })?;
        let mut warnings = Vec::new();
        let vocabulary = config.vocab_size;
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or_default();
        if largest as usize >= vocabulary {
            warnings
                .push(format!("{TOKENIZER} has token {largest}, and the model has {vocabulary}"));
        }
        let padding = tokenizer.get_padding().map(|padding| padding.pad_id);
        let named = pad_token(&folder.join(TOKENIZER_CONFIG))?;
        let named = named.and_then(|token| tokenizer.token_to_id(&token));
        for (file, token) in [(TOKENIZER, padding), (TOKENIZER_CONFIG, named)] {
            let (Some(token), Some(row)) = (token, config.pad_token_id) else { continue };
            if token as usize != row {
                warnings.push(format!(
                    "{file} pads with token {token}, and pad_token_id is {row} in config.json: \
                     {row} is used"
                ));
            }
        }
        // A text is one sequence, however long it is.
        let whole = tokenizer.with_truncation(None).map(|it| it.with_padding(None)).map(drop);
        whole.map_err(|error| failed(folder, &*error))?;
        Ok(Self { tokenizer, bytes, folder: folder.to_owned(), vocabulary, warnings })
    }

    /// Returns a text for each difference from the model that changes nothing in training: another
    /// padding token, or more tokens.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Reads a text.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`], and [`DataError::UnknownToken`] if the text has a token that the
    /// model does not have.
    pub fn tokens(&self, text: &str) -> Result<Tokens, DataError> {
        let encoding = self.tokenizer.encode_fast(text, false);
        let encoding = encoding.map_err(|error| failed(&self.folder, &*error))?;
        let (ids, vocabulary) = (encoding.get_ids().to_vec(), self.vocabulary);
        if let Some(token) = ids.iter().copied().find(|token| *token as usize >= vocabulary) {
            let folder = self.folder.clone();
            return Err(DataError::UnknownToken { folder, token, vocabulary });
        }
        let digest = Digest::of(&[text.as_bytes(), &self.bytes].concat());
        Ok(Tokens { ids, vocabulary, item: "token", digest })
    }
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
