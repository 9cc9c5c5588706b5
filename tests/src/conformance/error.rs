//! The errors of a case that cannot be read or makes no sense, before anything runs.

use std::path::PathBuf;

use hsdp_train::file::FileError;

/// A case that cannot be read. Its message is one line that begins with the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaseError {
    /// A file is missing, no regular file, or too long.
    #[error(transparent)]
    File(#[from] FileError),
    /// `case.json` is no JSON, or lacks a field.
    #[error("{}: {source}", .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The error, with its line.
        source: serde_json::Error,
    },
    /// A file of tensors is not in the safetensors format.
    #[error("{}: {source}", .path.display())]
    SafeTensors {
        /// The file.
        path: PathBuf,
        /// The error.
        source: safetensors::SafeTensorError,
    },
    /// A file can be read, and says something that makes no sense.
    #[error("{}: {what}", .path.display())]
    Senseless {
        /// The file.
        path: PathBuf,
        /// The invalid field, and the reason.
        what: String,
    },
}

impl CaseError {
    pub(super) fn senseless(path: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Self::Senseless { path: path.into(), what: what.into() }
    }
}
