//! The Markdown files of this repository, as a text to train on.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hsdp_train::file::{self, FileError};

use super::failure::Failure;

/// The most bytes of a text. A character takes 4 bytes of memory.
pub(crate) const MAX_TEXT: u64 = 256 << 20;

/// The Markdown files of the repository that this program was built from.
pub(crate) fn read_repository() -> Result<String, Failure> {
    read_markdown(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."), MAX_TEXT)
}

/// The Markdown files in a folder and in those below it, by path, with at most `most` bytes together.
pub(crate) fn read_markdown(root: &Path, most: u64) -> Result<String, Failure> {
    let mut files = Vec::new();
    collect_markdown(root, &mut files).map_err(|error| {
        Failure::Input(format!("cannot look for Markdown files in {}: {error}", root.display()))
    })?;
    files.sort();
    let (mut texts, mut left) = (Vec::new(), most);
    for path in files {
        let text = file::read_text(&path, left).map_err(|error| match error {
            FileError::TooLong { .. } => Failure::Input(format!(
                "the Markdown files in {} have more than {most} bytes together",
                root.display()
            )),
            error => Failure::input(error),
        })?;
        // A newline stands between two texts.
        left = left.saturating_sub(text.len() as u64 + 1);
        texts.push(text);
    }
    Ok(texts.join("\n"))
}

fn collect_markdown(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, entry.file_name());
        let name = name.to_string_lossy();
        // Build outputs and hidden folders are not the project's text.
        if kind.is_dir() && !name.starts_with('.') && name != "target" {
            collect_markdown(&entry.path(), files)?;
        } else if kind.is_file() && name.ends_with(".md") {
            files.push(entry.path());
        }
    }
    Ok(())
}
