//! Places of a copy of NCCL: a folder `nvidia/nccl`, as its packages on PyPI install it.

use std::env;
use std::path::{Path, PathBuf};

/// A file of NCCL: the file that the variable names, or else that of a package.
pub(crate) fn find(variable: &str, file: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).or_else(|| in_a_package(file))
}

/// The reason why a test is ignored whose file was not found.
pub(crate) fn missing(variable: &str, file: &str) -> String {
    format!(
        "needs {file}: neither ${variable} nor nvidia-nccl-cu12 or -cu13 in target/nccl or $VIRTUAL_ENV"
    )
}

fn in_a_package(file: &str) -> Option<PathBuf> {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().map(|target| target.join("nccl"));
    let folders = cache.into_iter().chain(site_packages());
    folders.map(|folder| folder.join("nvidia/nccl").join(file)).find(|path| path.is_file())
}

/// The folders of the active virtual environment.
fn site_packages() -> Vec<PathBuf> {
    let Some(environment) = env::var_os("VIRTUAL_ENV") else { return Vec::new() };
    let versions = Path::new(&environment).join("lib").read_dir().into_iter().flatten().flatten();
    versions.map(|version| version.path().join("site-packages")).collect()
}
