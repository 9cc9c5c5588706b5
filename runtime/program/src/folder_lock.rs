//! One run at a time in the folder of a run.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

/// The file that is locked. It stays when the run ends: without it two later runs could lock two files of this name.
const NAME: &str = "run.lock";

/// The most bytes of the file that a second run reads: the number of a process has fewer.
const MOST_BYTES: u64 = 20;

/// The right to write to the folder of a run, which one process at a time has. It ends when this value is dropped, or when the
/// process ends, however that happens: the operating system holds the lock.
#[derive(Debug)]
pub struct FolderLock {
    /// Locked as long as it is open.
    _locked: File,
}

/// The reason for which a folder could not be locked. No file has been changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another process holds the lock.
    #[error("another run{} writes to {}", by(*.holder), .folder.display())]
    Held {
        /// The folder.
        folder: PathBuf,
        /// The number of that process on its machine, if the file has it.
        holder: Option<u32>,
    },
    /// The file cannot be opened or locked.
    #[error("cannot write to {}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

fn by(holder: Option<u32>) -> String {
    holder.map_or_else(String::new, |process| format!(" (process {process})"))
}

impl FolderLock {
    /// Takes the lock of a folder that exists, without waiting for it. A program takes it before it changes any other file there.
    ///
    /// A file system without locks is a warning: the user then keeps two runs apart.
    ///
    /// # Errors
    /// [`LockError::Held`] if another run has it; [`LockError::Io`].
    pub fn take(folder: &Path) -> Result<Self, LockError> {
        let path = folder.join(NAME);
        let refused = |source| LockError::Io { path: path.clone(), source };
        let mut file = open(&path).map_err(refused)?;
        match file.try_lock() {
            Ok(()) => name_holder(&mut file),
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Held { folder: folder.to_owned(), holder: holder(file) });
            }
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                let folder = folder.display();
                tracing::warn!(%folder, "this file system has no locks: nothing keeps a second run from this folder");
            }
            Err(TryLockError::Error(error)) => return Err(refused(error)),
        }
        Ok(Self { _locked: file })
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    // A link could lead to another user's file, which would then have this process's number.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        rustix::fs::OFlags::NOFOLLOW.bits().cast_signed(),
    );
    options.open(path)
}

/// Writes the number of this process. The lock holds without it, so an error is ignored.
fn name_holder(file: &mut File) {
    let _ = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
}

fn holder(file: File) -> Option<u32> {
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_run_at_a_time_has_the_folder_and_the_next_learns_which() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = FolderLock::take(folder.path()).expect("no other run");
        let refused = FolderLock::take(folder.path()).expect_err("the first run is there");
        let (process, name) = (std::process::id(), folder.path().display());
        let expected = format!("another run (process {process}) writes to {name}");
        assert_eq!(refused.to_string(), expected);
        drop(first);
        FolderLock::take(folder.path()).expect("the first run has ended");
    }

    #[test]
    fn a_file_of_another_kind_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join(NAME)).expect("a folder");
        let refused = FolderLock::take(folder.path()).expect_err("a folder is no file");
        assert!(matches!(refused, LockError::Io { .. }), "{refused}");
        assert!(refused.to_string().contains(NAME), "{refused}");
    }
}
