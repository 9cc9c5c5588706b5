//! The operations that this crate needs of a file system. They are few, so that a test can make
//! each of them fail.

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// A file system that is read. [`Generation`](crate::Generation) and [`Folder`](crate::Folder) need
/// no more.
pub trait ReadFiles: Debug + Send + Sync {
    /// Returns the paths of a directory's entries, sorted by name.
    ///
    /// # Errors
    /// `NotFound`, or another error of the system.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;

    /// Opens a regular file for reading. A link in the place of the file or of its directory is
    /// refused, except by [`LinkedDisk`](crate::LinkedDisk). Does not wait, whatever is in that
    /// place.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if a link, a FIFO, a device or a directory is there; another
    /// error of the system.
    fn open(&self, path: &Path) -> io::Result<Box<dyn FileSource>>;
}

/// A file system. [`Disk`](crate::Disk) is the real one; another implementation may count
/// operations, or make them fail. The directory of a store and its lease are always on the real
/// one.
pub trait Files: ReadFiles {
    /// Makes a directory. Its parent must exist.
    ///
    /// # Errors
    /// `AlreadyExists`, or another error of the system.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Makes an empty file, and opens it for writing.
    ///
    /// # Errors
    /// `AlreadyExists`, or another error of the system.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink>>;

    /// Syncs a directory, so that its entries survive a loss of power.
    ///
    /// # Errors
    /// The error of the system.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Renames a file or a directory, replacing a file that has the new name.
    ///
    /// # Errors
    /// The error of the system.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Makes the symbolic link `link`, which points to `target`.
    ///
    /// # Errors
    /// `AlreadyExists`, or another error of the system.
    fn link(&self, target: &Path, link: &Path) -> io::Result<()>;

    /// Removes a file, a link, or a directory with all its contents.
    ///
    /// # Errors
    /// `NotFound`, or another error of the system.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written.
pub trait Sink: Send {
    /// Appends all of `bytes`.
    ///
    /// # Errors
    /// `StorageFull`, or another error of the system.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Syncs the file, so that all written bytes survive a loss of power.
    ///
    /// # Errors
    /// The error of the system. The written bytes may then be lost.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file that is being read.
pub trait FileSource: Send + Sync {
    /// The size of the file in bytes.
    ///
    /// # Errors
    /// The error of the system.
    fn size(&self) -> io::Result<u64>;

    /// Fills `bytes` from the file, beginning at byte `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before `bytes` is full, or another error of the system.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// Returns the directory that contains a path.
pub(crate) fn directory_of(path: &Path) -> &Path {
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    above.unwrap_or(Path::new("."))
}

/// Reads a whole file of at most `most` bytes.
pub(crate) fn read_whole(files: &dyn ReadFiles, path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let source = files.open(path)?;
    let size = source.size()?;
    if size > most {
        let what = format!("it has {size} bytes; at most {most} are read");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
    }
    let mut bytes = vec![0; usize::try_from(size).map_err(io::Error::other)?];
    source.read_at(0, &mut bytes)?;
    Ok(bytes)
}

/// Writes a file with the bytes that `act` provides, and syncs it.
pub(crate) fn write_synced(
    files: &dyn Files,
    path: &Path,
    act: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut sink = files.create(path).map_err(Error::io("create", path))?;
    act(&mut |bytes| sink.write(bytes).map_err(Error::io("write", path)))?;
    sink.sync().map_err(Error::io("sync", path))
}
