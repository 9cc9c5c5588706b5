//! The project's own files, as text.

use std::fs;
use std::path::{Path, PathBuf};

/// A file of the project.
#[derive(Clone, Debug)]
pub struct Source {
    /// Relative to the root of the workspace, with `/` between its parts.
    pub path: String,
    /// What is in it.
    pub text: String,
}

impl Source {
    /// Its lines with their numbers, counted from 1.
    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }

    /// Lines that are neither blank nor comments.
    #[must_use]
    pub fn lines_of_code(&self) -> usize {
        let code = |line: &str| !line.is_empty() && !line.starts_with("//");
        self.lines().filter(|(_, line)| code(line.trim_start())).count()
    }
}

/// The root of the workspace.
///
/// # Panics
/// If this crate lies in no folder.
#[must_use]
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("this crate is a folder of the workspace").to_owned()
}

/// Every file with text in it, in order of path; what builds and runs leave behind is left out.
///
/// # Panics
/// If a folder cannot be read.
#[must_use]
pub fn texts() -> Vec<Source> {
    let root = root();
    let mut sources = Vec::new();
    collect(&root, &root, &mut sources);
    sources.sort_by(|one, other| one.path.cmp(&other.path));
    sources
}

/// Every file of Rust.
#[must_use]
pub fn rust() -> Vec<Source> {
    let mut sources = texts();
    sources.retain(|source| source.path.ends_with(".rs"));
    sources
}

fn collect(root: &Path, folder: &Path, sources: &mut Vec<Source>) {
    let entries = fs::read_dir(folder).expect("a folder of the workspace can be read");
    for entry in entries {
        let path = entry.expect("a folder of the workspace can be read").path();
        if is_left_behind(root, &path) {
            continue;
        }
        if path.is_dir() {
            collect(root, &path, sources);
        } else if let Ok(text) = fs::read_to_string(&path) {
            let parts = path.strip_prefix(root).expect("it lies below the root");
            let parts: Vec<_> = parts.iter().map(|part| part.to_string_lossy()).collect();
            sources.push(Source { path: parts.join("/"), text });
        }
    }
}

/// What `.gitignore` names, and the version control's own.
fn is_left_behind(root: &Path, path: &Path) -> bool {
    [".git", "target", "out"].iter().any(|name| path == root.join(name))
}
