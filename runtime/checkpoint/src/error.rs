//! The errors of this crate.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// An error of this crate. No error harms a generation that existed before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation of the file system failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Another job writes to this store.
    #[error(
        "{} is being written to by {holder}: a store has one writing job at a time",
        store.display()
    )]
    Leased {
        /// The store.
        store: PathBuf,
        /// The name that the other job gave to [`Store::lease`](crate::Store::lease).
        holder: String,
    },
    /// The store has an intact generation of this step, or of a later one.
    #[error(
        "{} exists and is intact: a save needs a later step than all existing checkpoints",
        path.display()
    )]
    Exists {
        /// Its directory.
        path: PathBuf,
    },
    /// The store has no generation of this step.
    #[error("{} has no generation of step {step}; it has {has:?}", store.display())]
    NoSuchStep {
        /// The store.
        store: PathBuf,
        /// The requested step.
        step: u64,
        /// The steps of the store's generations, ascending.
        has: Vec<u64>,
    },
    /// The generation was there when a reader looked, and has been removed or replaced since. It is
    /// no damage.
    #[error(
        "{} was removed while it was read: the job that writes there keeps its newest checkpoints \
         only",
        path.display()
    )]
    Removed {
        /// Its directory.
        path: PathBuf,
    },
    /// A manifest, note, index or header is invalid, or the files do not match it.
    #[error("{}: {problem}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// The problem, in words.
        problem: String,
    },
    /// A newer version of this program wrote the generation. It is no damage, and no other
    /// generation takes its place.
    #[error(
        "{}: this checkpoint was written by a newer version: format {found}, this program reads up \
         to {known}",
        path.display()
    )]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The newest format that this program reads.
        known: u64,
    },
    /// A file is shorter or longer than its manifest or header says.
    #[error("{} has {got} bytes, its manifest says {want}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        got: u64,
        /// The expected size in bytes.
        want: u64,
    },
    /// The bytes of a chunk differ from those that were written.
    #[error(
        "{}: elements {offset} to {end} of tensor `{}` are not those that were written: their hash \
         differs",
        path.display(), tensor.escape_debug()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The tensor that the chunk belongs to.
        tensor: Box<str>,
        /// The first element of the chunk, in row-major order.
        offset: u64,
        /// The element after the last one of the chunk.
        end: u64,
    },
    /// A requested tensor or range does not exist, or a slice that was passed in is invalid.
    #[error("tensor `{}`: {problem}", tensor.escape_debug())]
    Tensor {
        /// Its name.
        tensor: Box<str>,
        /// The problem, in words.
        problem: String,
    },
}

/// Number of names that the text of an error lists.
const LISTED: usize = 3;

/// Joins the first few texts of a list, and counts the rest: `a, b, c, and 4 more`.
#[must_use]
pub fn listed(texts: &[String], separator: &str) -> String {
    let (shown, rest) = texts.split_at(texts.len().min(LISTED));
    match rest.len() {
        0 => shown.join(separator),
        more => format!("{}{separator}and {more} more", shown.join(separator)),
    }
}

impl Error {
    /// For `map_err`: adds the operation and its path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn tensor(name: &str, problem: impl Into<String>) -> Self {
        Self::Tensor { tensor: name.into(), problem: problem.into() }
    }

    /// The problem may quote untrusted text: it becomes one line without control characters.
    pub(crate) fn manifest(path: &Path, problem: impl ToString) -> Self {
        let escaped =
            |it: char| if it.is_control() { it.escape_debug().to_string() } else { it.into() };
        let problem = problem.to_string().chars().map(escaped).collect();
        Self::Manifest { path: path.to_owned(), problem }
    }

    /// Whether bytes of the generation are certainly lost, so that no reader can ever read it.
    pub(crate) fn is_loss(&self) -> bool {
        match self {
            Self::Manifest { .. } | Self::Truncated { .. } | Self::Corrupt { .. } => true,
            Self::Io { source, .. } => {
                [io::ErrorKind::NotFound, io::ErrorKind::UnexpectedEof].contains(&source.kind())
            }
            _ => false,
        }
    }

    /// Returns whether the store has no such generation, or has it no longer: a writer may have
    /// removed it since a reader listed it.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::NoSuchStep { .. } | Self::Removed { .. })
    }

    /// Returns whether the generation itself is damaged, so that an older one may be readable.
    /// False for problems that every generation would have, such as a process that may not open
    /// more files, and for a generation that a newer version wrote.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        if let Self::Io { source, .. } = self {
            let lacks_files =
                matches!(Errno::from_io_error(source), Some(Errno::MFILE | Errno::NFILE));
            let kinds = [io::ErrorKind::PermissionDenied, io::ErrorKind::OutOfMemory];
            return !lacks_files && !kinds.contains(&source.kind());
        }
        matches!(self, Self::Manifest { .. } | Self::Truncated { .. } | Self::Corrupt { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_files_left_finds_no_damage() {
        let is_damage =
            |errno: Errno| Error::io("open", Path::new("manifest.json"))(errno.into()).is_damage();
        let errors = [Errno::MFILE, Errno::NFILE, Errno::ACCESS, Errno::NOENT, Errno::IO];
        assert_eq!(errors.map(is_damage), [false, false, false, true, true]);
    }
}
