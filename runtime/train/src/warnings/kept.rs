//! The file of warnings.

use std::path::{Path, PathBuf};

use crate::file::{self, FileError};

/// Maximum number of lines that wait for a file.
const MOST_EARLY: usize = 100;

/// Destination of the lines.
#[derive(Debug)]
pub(super) enum Kept {
    /// Lines that wait until a file is named.
    Early(Vec<String>),
    /// File to which lines are appended.
    In(PathBuf),
    /// The file could not be written. Lines are dropped.
    Lost,
}

impl Default for Kept {
    fn default() -> Self {
        Self::Early(Vec::new())
    }
}

impl Kept {
    /// Writes the waiting lines into `file`, and later lines too.
    ///
    /// # Errors
    /// If the file cannot be written. Later lines are then dropped.
    pub(super) fn begin(&mut self, file: &Path) -> Result<(), FileError> {
        let before = std::mem::replace(self, Self::In(file.to_owned()));
        let Self::Early(lines) = before else { return Ok(()) };
        lines.into_iter().try_for_each(|line| self.add(line))
    }

    /// Adds a line.
    ///
    /// # Errors
    /// Once, if the file cannot be written. Later lines are then dropped.
    pub(super) fn add(&mut self, line: String) -> Result<(), FileError> {
        match self {
            Self::Early(lines) if lines.len() < MOST_EARLY => lines.push(line),
            Self::Early(_) | Self::Lost => {}
            Self::In(file) => {
                // Warnings are rare, so the file is opened for each of them. It exists only if
                // there was one.
                let added = file::append(file, format!("{line}\n").as_bytes());
                return added.inspect_err(|_| *self = Self::Lost);
            }
        }
        Ok(())
    }
}
