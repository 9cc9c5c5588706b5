//! A lock that admits one run at a time to the folder of a run.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

/// Name of the locked file. It stays when the run ends: if it were removed, two later runs could
/// lock two files of this name.
const NAME: &str = "run.lock";

/// Maximum number of bytes that a second run reads from the file. A process number is shorter.
const MOST_BYTES: u64 = 20;

/// The exclusive right to write to the folder of a run. One process at a time has it. The operating
/// system holds the lock, so it ends when this value is dropped, or whenever and however the
/// process ends.
#[derive(Debug)]
pub(crate) struct FolderLock {
    locked: File,
}

/// The reason why a folder could not be locked. Files are unchanged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockError {
    /// Another process holds the lock.
    #[error("another run{} writes to {}", by(*.holder), .folder.display())]
    Held {
        /// The folder.
        folder: PathBuf,
        /// Number of the process that holds the lock, if the file contains it.
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
    /// Locks an existing folder without waiting. A program calls this before it changes any other
    /// file there.
    ///
    /// A file system without locks, such as NFS without a lock daemon, causes a warning: the user
    /// then has to keep two runs apart.
    pub(crate) fn take(folder: &Path) -> Result<Self, LockError> {
        let path = folder.join(NAME);
        let refused = |source| LockError::Io { path: path.clone(), source };
        let mut file = open(&path).map_err(refused)?;
        match file.try_lock() {
            Ok(()) => name_holder(&mut file),
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Held { folder: folder.to_owned(), holder: holder(file) });
            }
            Err(TryLockError::Error(error)) if has_no_locks(&error) => {
                let folder = folder.display();
                hsdp_warnings::warn!(
                    %folder,
                    "this file system has no locks: nothing keeps a second run from this folder"
                );
            }
            Err(TryLockError::Error(error)) => return Err(refused(error)),
        }
        Ok(Self { locked: file })
    }
}

/// Unlocks explicitly, because a child process that is being started holds a copy of the open file
/// until it executes its own program.
impl Drop for FolderLock {
    fn drop(&mut self) {
        // If this fails, the lock ends when the last copy is closed.
        let _ = self.locked.unlock();
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    // `NOFOLLOW`: a link could lead to somebody else's file, which would be overwritten with this
    // process's number. `NONBLOCK`: opening a FIFO could block.
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits().cast_signed(),
    );
    let file = options.open(path)?;
    match is_plain(&file.metadata()?) {
        true => Ok(file),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a regular file with one name",
        )),
    }
}

fn is_plain(file: &Metadata) -> bool {
    let names = std::os::unix::fs::MetadataExt::nlink(file);
    file.is_file() && names == 1
}

/// Returns whether an error means that the file system has no locks.
fn has_no_locks(error: &io::Error) -> bool {
    if error.raw_os_error() == Some(rustix::io::Errno::NOLCK.raw_os_error()) {
        return true;
    }
    error.kind() == io::ErrorKind::Unsupported
}

/// Writes the number of this process into the file. The lock is valid without it, so an error is
/// ignored.
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
        let process = std::process::id();
        let name = folder.path().display();
        let expected = format!("another run (process {process}) writes to {name}");
        assert_eq!(refused.to_string(), expected);
        drop(first);
        FolderLock::take(folder.path()).expect("the first run has ended");
    }

    #[test]
    fn only_a_missing_lock_is_forgiven() {
        use rustix::io::Errno;

        for errno in [Errno::NOLCK, Errno::NOSYS, Errno::OPNOTSUPP] {
            assert!(has_no_locks(&errno.into()), "{errno}");
        }
        for errno in [Errno::ACCESS, Errno::IO, Errno::BADF, Errno::INTR] {
            assert!(!has_no_locks(&errno.into()), "{errno}");
        }
    }

    #[test]
    fn a_file_of_another_kind_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join(NAME)).expect("a folder");
        let refused = FolderLock::take(folder.path()).expect_err("a folder is no file");
        assert!(matches!(refused, LockError::Io { .. }), "{refused}");
        assert!(refused.to_string().contains(NAME), "{refused}");
    }

    #[test]
    fn a_hard_link_and_a_fifo_are_refused_and_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let other = folder.path().join("other");
        let lock = folder.path().join(NAME);
        std::fs::write(&other, "precious").expect("written");
        std::fs::hard_link(&other, &lock).expect("linked");
        FolderLock::take(folder.path()).expect_err("the file has another name");
        assert_eq!(std::fs::read_to_string(&other).expect("there"), "precious");
        std::fs::remove_file(&lock).expect("removed");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &lock, rustix::fs::FileType::Fifo, mode, 0)
            .expect("a FIFO");
        FolderLock::take(folder.path()).expect_err("a FIFO is no regular file");
    }
}
