//! The file of the warnings.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// The most lines that wait for a file.
const MOST_EARLY: usize = 100;

/// The lines of the file.
#[derive(Debug)]
pub(super) enum Kept {
    /// The lines so far, until a file is named.
    Early(Vec<String>),
    /// The file, to which lines are appended.
    In(PathBuf),
    /// The file cannot be written.
    Lost(PathBuf),
}

impl Default for Kept {
    fn default() -> Self {
        Self::Early(Vec::new())
    }
}

impl Kept {
    /// Names the file.
    ///
    /// # Errors
    /// If it cannot be written; later lines are then dropped.
    pub(super) fn begin(&mut self, file: &Path) -> io::Result<()> {
        let before = std::mem::replace(self, Self::In(file.to_owned()));
        let Self::Early(lines) = before else { return Ok(()) };
        lines.into_iter().try_for_each(|line| self.add(line))
    }

    /// Adds a line.
    ///
    /// # Errors
    /// Once, if the file cannot be written; later lines are then dropped.
    pub(super) fn add(&mut self, line: String) -> io::Result<()> {
        match self {
            Self::Early(lines) if lines.len() < MOST_EARLY => lines.push(line),
            Self::Early(_) | Self::Lost(_) => {}
            Self::In(file) => {
                if let Err(error) = append(file, &line) {
                    *self = Self::Lost(std::mem::take(file));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    pub(super) fn file(&self) -> Option<&Path> {
        match self {
            Self::Early(_) => None,
            Self::In(file) | Self::Lost(file) => Some(file),
        }
    }
}

/// Warnings are rare: the file is opened for each, so that none is there without any.
fn append(file: &Path, line: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(file)?;
    file.write_all(format!("{line}\n").as_bytes())
}
