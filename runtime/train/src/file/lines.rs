//! Reads a file line by line.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use super::{FileError, open_regular};

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
            let (path, number, most) = (self.path.clone(), self.number, self.most);
            return Some(Err(FileError::LongLine { path, number, most }));
        }
        Some(Ok(line))
    }
}
