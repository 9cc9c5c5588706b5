//! The file system of the machine.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::files::{FileSource, Files, ReadFiles, Sink, directory_of};

/// The file system of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl ReadFiles for Disk {
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let mut entries: Vec<PathBuf> =
            fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
        entries.sort();
        Ok(entries)
    }

    /// Refuses links in the calls that open the directory and the file, so that no link can replace
    /// one of them between a check and the opening. Does not wait for the writer of a FIFO.
    fn open(&self, path: &Path) -> io::Result<Box<dyn FileSource>> {
        let name = path.file_name().ok_or_else(|| refused("it names no file"))?;
        let directory = open_directory(directory_of(path))?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
            Err(Errno::LOOP) => return Err(refused("it is a link")),
            opened => File::from(opened?),
        };
        if file.metadata()?.is_file() {
            return Ok(Box::new(file));
        }
        Err(refused("it is not a regular file"))
    }
}

impl Files for Disk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn link(&self, target: &Path, link: &Path) -> io::Result<()> {
        symlink(target, link)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if fs::symlink_metadata(path)?.is_dir() {
            fs::remove_dir_all(path)
        } else {
            fs::remove_file(path)
        }
    }
}

/// The access to a directory that contains a file. Linux opens it without reading it, and so
/// without the right to list it.
#[cfg(target_os = "linux")]
const ACCESS: OFlags = OFlags::PATH;
#[cfg(not(target_os = "linux"))]
const ACCESS: OFlags = OFlags::RDONLY;

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = ACCESS | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => {
            Err(refused("its directory is a link, or no directory"))
        }
        opened => Ok(opened?),
    }
}

fn refused(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// The file system of the machine, following links when it opens files: for folders that a user
/// names, such as a folder of models whose files are links.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkedDisk;

impl ReadFiles for LinkedDisk {
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        Disk.list(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn FileSource>> {
        Disk.open(&path.canonicalize()?)
    }
}

impl Sink for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

impl FileSource for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(bytes, offset)
    }
}
