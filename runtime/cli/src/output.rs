//! Output files that options name. They are checked before the work, and written as a whole after
//! it.

use std::path::{Path, PathBuf};

use hsdp_train::file::{FileError, Output, OutputFolder};

/// Checks an output file, if there is one. It must be none of `inputs`, which may also be names of
/// bundled models and machines.
///
/// # Errors
/// A text of one line.
pub(crate) fn check(file: Option<&PathBuf>, inputs: &[&Path]) -> Result<Option<Output>, String> {
    file.map(|file| Output::check(file, inputs).map_err(cannot_write)).transpose()
}

/// Refuses stdout as an output file, for a command that prints JSON.
///
/// # Errors
/// A text of one line.
pub(crate) fn check_beside_json(files: &[&Option<Output>]) -> Result<(), String> {
    files.iter().copied().flatten().try_for_each(Output::differs_from_stdout).map_err(cannot_write)
}

/// Checks an output folder, if there is one.
///
/// # Errors
/// A text of one line.
pub(crate) fn check_folder(folder: Option<&PathBuf>) -> Result<Option<OutputFolder>, String> {
    folder.map(|folder| OutputFolder::check(folder).map_err(cannot_write)).transpose()
}

/// Returns the message about a file that cannot be written.
pub(crate) fn cannot_write(error: FileError) -> String {
    format!("cannot write {error}")
}
