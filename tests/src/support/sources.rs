//! The project's own files, as text.

use std::fs;
use std::path::{Path, PathBuf};

/// A file of the project.
#[derive(Clone, Debug)]
pub struct Source {
    /// Relative to the root of the workspace, with `/` between its parts.
    pub path: String,
    /// Its content.
    pub text: String,
}

impl Source {
    /// Its lines with their numbers, counted from 1.
    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
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

/// Every file with text in it, in order of path. The files that [`paths`] leaves out are left out.
///
/// # Panics
/// If a folder cannot be read.
#[must_use]
pub fn texts() -> Vec<Source> {
    let root = root();
    let read = |path: String| {
        let text = fs::read_to_string(root.join(&path)).ok()?;
        Some(Source { path, text })
    };
    paths().into_iter().filter_map(read).collect()
}

/// The path of every file, text or not, in order: relative to the root of the workspace, with `/`
/// between its parts. The files that builds, runs and fuzzers leave behind are left out.
///
/// # Panics
/// If a folder cannot be read.
#[must_use]
pub fn paths() -> Vec<String> {
    let root = root();
    let mut paths = Vec::new();
    collect(&root, &root, &mut paths);
    paths.sort();
    paths
}

/// Every file of Rust.
#[must_use]
pub fn rust() -> Vec<Source> {
    let mut sources = texts();
    sources.retain(|source| source.path.ends_with(".rs"));
    sources
}

fn collect(root: &Path, folder: &Path, paths: &mut Vec<String>) {
    let entries = fs::read_dir(folder).expect("a folder of the workspace can be read");
    for entry in entries {
        let path = entry.expect("a folder of the workspace can be read").path();
        if is_left_behind(root, &path) {
            continue;
        }
        if path.is_dir() {
            collect(root, &path, paths);
        } else {
            let parts = path.strip_prefix(root).expect("it lies below the root");
            let parts: Vec<_> = parts.iter().map(|part| part.to_string_lossy()).collect();
            paths.push(parts.join("/"));
        }
    }
}

/// Whether `.gitignore` names the path, or it is git's own folder.
fn is_left_behind(root: &Path, path: &Path) -> bool {
    let at_the_root =
        [".git", "target", "out", "run", "logs"].iter().any(|name| path == root.join(name));
    at_the_root || path.ends_with("fuzz/found")
}
