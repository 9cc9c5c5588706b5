//! What is asked of a file system: few things, so that a test can have each of them fail.

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};

/// A file system. [`Disk`](crate::Disk) is the real one; a program's own may count what is asked of it, or fail. The directory of a store and
/// its lease are always on the real one.
pub trait Files: Debug + Send + Sync {
    /// Makes a directory, whose parents are there.
    ///
    /// # Errors
    /// `AlreadyExists`, or whatever the system says.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Makes a file, to be written from its beginning.
    ///
    /// # Errors
    /// `AlreadyExists`, or whatever the system says.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink>>;

    /// Has all entries of a directory outlast a loss of power.
    ///
    /// # Errors
    /// Whatever the system says.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Renames a file or a directory, replacing a file that has the new name.
    ///
    /// # Errors
    /// Whatever the system says.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// `AlreadyExists`, or whatever the system says.
    fn link(&self, target: &Path, link: &Path) -> io::Result<()>;

    /// Removes a file, a link, or a directory with all that is in it.
    ///
    /// # Errors
    /// `NotFound`, or whatever the system says.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// The entries of a directory, by name.
    ///
    /// # Errors
    /// `NotFound`, or whatever the system says.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;

    /// Opens a file, which is no link, to be read.
    ///
    /// # Errors
    /// `NotFound`, or whatever the system says.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Source>>;
}

/// A file that is being written.
pub trait Sink: Send {
    /// Writes all of `bytes` behind what was written.
    ///
    /// # Errors
    /// `StorageFull`, or whatever the system says.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Has all that was written outlast a loss of power.
    ///
    /// # Errors
    /// Whatever the system says: then what was written may be lost.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file that is being read.
pub trait Source: Send + Sync {
    /// How many bytes it has.
    ///
    /// # Errors
    /// Whatever the system says.
    fn size(&self) -> io::Result<u64>;

    /// Reads as many bytes as there is room for, from `offset` on.
    ///
    /// # Errors
    /// `UnexpectedEof` if there are not so many, or whatever the system says.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// Reads a whole file of at most `most` bytes.
pub(crate) fn read_whole(files: &dyn Files, path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let source = files.open(path)?;
    let size = source.size()?;
    if size > most {
        let what = format!("it has {size} bytes, {most} are the most");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
    }
    let mut bytes = vec![0; usize::try_from(size).map_err(io::Error::other)?];
    source.read_at(0, &mut bytes)?;
    Ok(bytes)
}
