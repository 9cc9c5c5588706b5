//! Libraries that imitate NCCL. The compiler of this test builds each in a folder of its own.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::Failed;
use nccl_sys::declared;
use tempfile::TempDir;

/// The system on which they are built. On others libraries have other names, and NCCL does not exist.
pub(crate) const TESTED_ON: bool = cfg!(target_os = "linux");

/// A library, which is deleted when this is dropped.
#[derive(Debug)]
pub(crate) struct Imitation {
    folder: TempDir,
    path: PathBuf,
}

impl Imitation {
    /// A library with these functions.
    pub(crate) fn new(functions: &str) -> Result<Self, Failed> {
        let folder = TempDir::new()?;
        let source = folder.path().join("nccl.rs");
        let path = folder.path().join("imitation.so");
        fs::write(&source, functions)?;
        let rustc = env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
        let mut command = Command::new(rustc);
        command.args(["--edition=2024", "--crate-type=cdylib", "-o"]).arg(&path).arg(&source);
        let output = command.output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
        }
        Ok(Self { folder, path })
    }

    /// A library with `ncclGetVersion` alone.
    pub(crate) fn of_version(code: i32) -> Result<Self, Failed> {
        Self::answering(0, code)
    }

    /// A library with `ncclGetVersion` alone, which returns a status.
    pub(crate) fn answering(status: i32, code: i32) -> Result<Self, Failed> {
        Self::new(&get_version(status, code))
    }

    /// A library with all functions. Only `ncclGetVersion` may be called.
    pub(crate) fn complete(code: i32) -> Result<Self, Failed> {
        let names = declared::ALL.functions.iter().map(|it| it.name);
        let others = names.filter(|name| *name != "ncclGetVersion");
        let others =
            others.map(|name| format!("{EXPORTED} fn {name}() {{ std::process::abort() }}\n"));
        Self::new(&(get_version(0, code) + &others.collect::<String>()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn copy_to(&self, path: &Path) -> Result<(), Failed> {
        fs::copy(&self.path, path)?;
        Ok(())
    }
}

const EXPORTED: &str = "#[unsafe(no_mangle)] pub extern \"C\"";

fn get_version(status: i32, code: i32) -> String {
    format!(
        "{EXPORTED} fn ncclGetVersion(version: &mut i32) -> i32 {{ *version = {code}; {status} }}\n"
    )
}
