//! Files that a user names: only regular files, with a bounded length or bounded lines.

mod output;

use std::fmt;
use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use self::output::{Output, OutputFolder, replace_at, replace_with};

use crate::stderr::in_one_line;

/// The reason why a file was not read or written. The text is one line that begins with the path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file is missing, or the system does not permit this process to read or write it.
    #[error("{}: {source}", ShownPath(.path))]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// It is a directory, a device, a FIFO or a socket. A read of these may never return.
    #[error("{}: it is {kind}; a regular file is needed", ShownPath(.path))]
    NotRegular {
        /// The file.
        path: PathBuf,
        /// Its kind, with an article.
        kind: &'static str,
    },
    /// It is longer than the limit.
    #[error("{}: it has more than {most} bytes", ShownPath(.path))]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Maximum number of bytes in the file.
        most: u64,
    },
    /// One of its lines is longer than the limit.
    #[error("{}: line {number} has more than {most} bytes", ShownPath(.path))]
    LongLine {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        number: u64,
        /// Maximum number of bytes in a line.
        most: u64,
    },
    /// It is also an input of the same command.
    #[error("{}: it is an input, {}, and would be overwritten", ShownPath(.path), ShownPath(.input))]
    IsInput {
        /// The file to write.
        path: PathBuf,
        /// The path of that input, as the user named it.
        input: PathBuf,
    },
    /// Two outputs of a command go to the same file or stream.
    #[error("{}: it is named twice, and has room for one output", ShownPath(.path))]
    Twice {
        /// The file to write.
        path: PathBuf,
    },
    /// It is stdout, which the command already uses for output that another program reads.
    #[error("{}: it is stdout, to which another output goes", ShownPath(.path))]
    IsStdout {
        /// The file to write.
        path: PathBuf,
    },
    /// It is a mount point, so no other file can take its place.
    #[error("{}: it is a mount point, which cannot be replaced", ShownPath(.path))]
    IsMountPoint {
        /// The file to write.
        path: PathBuf,
    },
    /// The name of a file to write is empty.
    #[error("the name of a file is empty")]
    NoName,
    /// The folder has no file with this extension.
    #[error("{}: there is no file .{extension} in it", ShownPath(.path))]
    NoFile {
        /// The folder.
        path: PathBuf,
        /// The extension.
        extension: String,
    },
    /// It is not UTF-8.
    #[error("{}: it is not UTF-8 text", ShownPath(.path))]
    NotText {
        /// The file.
        path: PathBuf,
    },
}

/// Reads a regular file of at most `most` bytes. Does not block on FIFOs, and holds at most `most`
/// bytes.
///
/// # Errors
/// [`FileError`]
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, FileError> {
    let failed = |source| FileError::Io { path: path.to_owned(), source };
    let file = open_regular(path)?;
    let too_long = || FileError::TooLong { path: path.to_owned(), most };
    if file.metadata().map_err(failed)?.len() > most {
        return Err(too_long());
    }
    // The file may grow during the read, and files in /proc report a length of 0.
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most { Err(too_long()) } else { Ok(bytes) }
}

/// Reads a UTF-8 text as [`read`] reads bytes.
///
/// # Errors
/// [`FileError`]
pub fn read_text(path: &Path, most: u64) -> Result<String, FileError> {
    String::from_utf8(read(path, most)?).map_err(|_| FileError::NotText { path: path.to_owned() })
}

/// Reads the files with an extension in a folder and in the folders below it. Returns one text, in
/// the order of the paths, with a newline between two files. A link to a regular file counts as
/// that file. Hidden folders, folders named `target` and links to folders are left out.
///
/// # Errors
/// [`FileError::NoFile`] if there is no such file; [`FileError::TooLong`] with the folder if all
/// files together have more than `most` bytes; [`FileError::Io`] for a broken link; other
/// [`FileError`]s.
pub fn read_texts(folder: &Path, extension: &str, most: u64) -> Result<String, FileError> {
    let mut files = Vec::new();
    collect(folder, extension, &mut files)?;
    if files.is_empty() {
        let path = folder.to_owned();
        let extension = extension.to_owned();
        return Err(FileError::NoFile { path, extension });
    }
    files.sort();
    let mut texts = Vec::new();
    let mut left = most;
    for path in files {
        let text = read_text(&path, left).map_err(|error| match error {
            FileError::TooLong { .. } => FileError::TooLong { path: folder.to_owned(), most },
            error => error,
        })?;
        left = left.saturating_sub(text.len() as u64 + 1);
        texts.push(text);
    }
    Ok(texts.join("\n"))
}

fn collect(folder: &Path, extension: &str, files: &mut Vec<PathBuf>) -> Result<(), FileError> {
    let failed = |source| FileError::Io { path: folder.to_owned(), source };
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        let kind = entry.file_type().map_err(failed)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if kind.is_dir() && !name.starts_with('.') && name != "target" {
            collect(&path, extension, files)?;
        } else if path.extension().is_some_and(|it| it == extension) {
            // `metadata` follows links.
            let failed = |source| FileError::Io { path: path.clone(), source };
            if path.metadata().map_err(failed)?.is_file() {
                files.push(path);
            }
        }
    }
    Ok(())
}

/// Refuses a path at which no file can be written: anything that exists there must be a regular
/// file.
fn check_writable(path: &Path) -> Result<(), FileError> {
    match path.metadata() {
        Ok(found) => regular(path, &found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(FileError::Io { path: path.to_owned(), source }),
    }
}

/// Opens a regular file for reading.
fn open_regular(path: &Path) -> Result<File, FileError> {
    let failed = |source| FileError::Io { path: path.to_owned(), source };
    let file = open(path, OpenOptions::new().read(true)).map_err(failed)?;
    // This metadata is of the opened file, so the file cannot be exchanged after the check.
    regular(path, &file.metadata().map_err(failed)?)?;
    Ok(file)
}

fn regular(path: &Path, found: &Metadata) -> Result<(), FileError> {
    if found.is_file() {
        return Ok(());
    }
    Err(FileError::NotRegular { path: path.to_owned(), kind: kind(found.file_type()) })
}

/// Appends to a regular file, and creates it if it is missing. Does not wait for a FIFO's reader.
pub(crate) fn append(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let failed = |source| FileError::Io { path: path.to_owned(), source };
    let mut file = open(path, OpenOptions::new().append(true).create(true)).map_err(failed)?;
    regular(path, &file.metadata().map_err(failed)?)?;
    file.write_all(bytes).map_err(failed)
}

/// Creates an empty file for lines that are written as they come, in place of an old one. Does not
/// wait for a FIFO's reader.
///
/// # Errors
/// [`FileError::NotRegular`], [`FileError::Io`].
pub fn create_log(path: &Path) -> Result<File, FileError> {
    let failed = |source| FileError::Io { path: path.to_owned(), source };
    check_writable(path)?;
    let options = &mut OpenOptions::new();
    let file = open(path, options.write(true).create(true).truncate(false)).map_err(failed)?;
    regular(path, &file.metadata().map_err(failed)?)?;
    file.set_len(0).map_err(failed)?;
    Ok(file)
}

/// Opens a file without waiting for the other end of a FIFO.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        options,
        (rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY).bits().cast_signed(),
    );
    options.open(path)
}

fn kind(of: FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt as _;

    match of {
        of if of.is_dir() => "a directory",
        of if of.is_fifo() => "a FIFO",
        of if of.is_char_device() || of.is_block_device() => "a device",
        _ => "no file",
    }
}

/// Shows a path in one line.
struct ShownPath<'a>(&'a Path);

impl fmt::Display for ShownPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&in_one_line(self.0.display()))
    }
}

/// Iterator over the lines of a file, without their line ends. Made by [`lines`].
#[derive(Debug)]
pub struct Lines {
    path: PathBuf,
    file: BufReader<File>,
    /// Maximum number of bytes in a line, without its end.
    most: u64,
    /// Number of the last line that was read, from 1.
    number: u64,
}

/// Opens a regular file of any length whose lines have at most `most` bytes. Does not block on
/// FIFOs, and holds one line at a time.
///
/// # Errors
/// [`FileError::Io`], [`FileError::NotRegular`]. Reading a line returns [`FileError::Io`] or
/// [`FileError::LongLine`].
pub fn lines(path: &Path, most: u64) -> Result<Lines, FileError> {
    let file = BufReader::new(open_regular(path)?);
    Ok(Lines { path: path.to_owned(), file, most, number: 0 })
}

impl Lines {
    /// Returns the next line with its line end, which the last line may lack. Empty at the end of
    /// the file.
    fn read(&mut self) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        let most = self.most.saturating_add(1);
        self.file.by_ref().take(most).read_until(b'\n', &mut line)?;
        Ok(line)
    }
}

impl Iterator for Lines {
    type Item = Result<Vec<u8>, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut line = match self.read() {
            Err(source) => return Some(Err(FileError::Io { path: self.path.clone(), source })),
            Ok(line) if line.is_empty() => return None,
            Ok(line) => line,
        };
        self.number += 1;
        if line.last() == Some(&b'\n') {
            line.pop();
        }
        if line.len() as u64 > self.most {
            let path = self.path.clone();
            let number = self.number;
            let most = self.most;
            return Some(Err(FileError::LongLine { path, number, most }));
        }
        Some(Ok(line))
    }
}

/// Length and hash of an input, which processes compare when each has its own copy.
///
/// ```
/// use hsdp_train::Digest;
///
/// let text = Digest::of(b"to be or not to be");
/// assert_eq!(text.to_string(), "18 bytes with hash d54dabe2451f3601");
/// assert_ne!(text, Digest::of(b"to be or not to bee"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    bytes: usize,
    hash: u64,
}

impl Digest {
    /// Returns the digest of `bytes`. It detects accidents, not forgery: the hash is not
    /// cryptographic.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len(), hash: xxh3_64_with_seed(bytes, 0) }
    }

    /// Returns the hash alone.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes with hash {:016x}", self.bytes, self.hash)
    }
}
