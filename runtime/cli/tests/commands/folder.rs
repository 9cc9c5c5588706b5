//! A folder for the files of a command.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::program::hsdp;

/// A folder for the files of a command. It is removed at the end of a test.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().expect("a folder"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn name(&self) -> String {
        self.path().display().to_string()
    }

    /// Returns the path of a file, which need not exist.
    pub(crate) fn at(&self, name: &str) -> String {
        self.path().join(name).display().to_string()
    }

    /// Writes a file, and returns its path.
    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.at(name);
        fs::write(&path, text).expect("written");
        path
    }

    /// Runs a command that must refuse its input, and returns its error, which is one line. `DIR`
    /// replaces the folder in it.
    pub(crate) fn refused(&self, arguments: &[&str]) -> String {
        let (code, said, told) = hsdp(arguments);
        assert_eq!((code, &*said), (Some(2), ""), "{arguments:?}: {told}");
        let line = told.strip_suffix('\n').filter(|line| !line.contains('\n'));
        line.unwrap_or_else(|| panic!("{told}")).replace(&self.name(), "DIR")
    }
}

/// Returns what a command prints with `--json`.
pub(crate) fn json(arguments: &[&str]) -> Value {
    let (code, text, told) = hsdp(&[arguments, &["--json"]].concat());
    assert_eq!((code, &*told), (Some(0), ""), "{arguments:?}");
    serde_json::from_str(&text).expect("JSON")
}
