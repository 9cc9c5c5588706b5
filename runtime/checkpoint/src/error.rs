//! What can be wrong with checkpoints.

use std::io;
use std::path::{Path, PathBuf};

/// What can be wrong with checkpoints. Whatever it is, no generation that was there is any worse for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was to be done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another job writes to this store.
    #[error("{} is being written to by {holder}: a store has one writing job at a time", store.display())]
    Leased {
        /// The store.
        store: PathBuf,
        /// As it named itself.
        holder: String,
    },
    /// There is a generation of this step, or of a later one.
    #[error("{} is there, and intact: what is saved is later than all that is there", path.display())]
    Exists {
        /// Where it is.
        path: PathBuf,
    },
    /// There is no generation of this step.
    #[error("{} has no generation of step {step}; it has {has:?}", store.display())]
    NoSuchStep {
        /// The store.
        store: PathBuf,
        /// Which one was asked for.
        step: u64,
        /// Those that it has.
        has: Vec<u64>,
    },
    /// A manifest that cannot be used.
    #[error("{}: {problem}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A manifest of another format.
    #[error("{} has format {found}; this program knows format {known}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The newest that is known.
        known: u64,
    },
    /// A file is shorter or longer than its manifest says.
    #[error("{} has {got} bytes, its manifest says {want}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        got: u64,
        /// Those that it had.
        want: u64,
    },
    /// Bytes are not those that were written.
    #[error(
        "{}: elements {offset} to {end} of tensor `{tensor}` are not those that were written: their hash differs",
        path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Of which tensor.
        tensor: Box<str>,
        /// The first of its elements in the chunk.
        offset: u64,
        /// Behind the last.
        end: u64,
    },
    /// What is asked for is not in the checkpoint, or what is given does not fit it.
    #[error("tensor `{tensor}`: {problem}")]
    Tensor {
        /// Its name.
        tensor: Box<str>,
        /// What is wrong.
        problem: String,
    },
}

impl Error {
    /// For `map_err`: what was to be done, and to what.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn tensor(name: &str, problem: impl Into<String>) -> Self {
        Self::Tensor { tensor: name.into(), problem: problem.into() }
    }

    pub(crate) fn manifest(path: &Path, problem: impl ToString) -> Self {
        Self::Manifest { path: path.to_owned(), problem: problem.to_string() }
    }

    /// Whether bytes of the generation are lost for certain: nobody will ever read it.
    pub(crate) fn is_loss(&self) -> bool {
        match self {
            Self::Manifest { .. } | Self::Truncated { .. } | Self::Corrupt { .. } => true,
            Self::Io { source, .. } => {
                [io::ErrorKind::NotFound, io::ErrorKind::UnexpectedEof].contains(&source.kind())
            }
            _ => false,
        }
    }

    /// Whether the generation is damaged, so that an older one may serve: as opposed to what no other one would mend, such as a process
    /// that may not open more files.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        if let Self::Io { source, .. } = self {
            let lacks_files =
                [libc::EMFILE, libc::ENFILE].map(Some).contains(&source.raw_os_error());
            let kinds = [io::ErrorKind::PermissionDenied, io::ErrorKind::OutOfMemory];
            return !lacks_files && !kinds.contains(&source.kind());
        }
        matches!(
            self,
            Self::Manifest { .. }
                | Self::Version { .. }
                | Self::Truncated { .. }
                | Self::Corrupt { .. }
        )
    }
}
