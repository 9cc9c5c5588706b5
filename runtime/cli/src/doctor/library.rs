//! Library files, both where the loader looks and where it does not.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};

use super::{DoctorFinding, FindingState};
use crate::mpirun::output;

/// A library that the runtime loads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sought {
    pub(super) key: &'static str,
    pub(super) what: &'static str,
    /// Environment variable that names the library, if there is one.
    pub(super) variable: Option<&'static str>,
    /// Names of the library, in the order in which they are tried.
    pub(super) names: &'static [&'static str],
    /// Advice, if the library is missing.
    pub(super) advice: &'static str,
}

/// Places where the loader looks for libraries.
#[derive(Debug)]
pub(super) struct LoaderPlaces {
    /// Folders in `LD_LIBRARY_PATH`.
    first: Vec<PathBuf>,
    /// Cache of the loader, by name.
    cache: BTreeMap<String, PathBuf>,
}

/// Folders where the loader looks last.
const DEFAULT: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// Folders where installers put libraries, including those where the loader does not look.
const USUAL: [&str; 5] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/lib/wsl/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
];

impl LoaderPlaces {
    /// Returns the places for this process. A cache that cannot be read counts as empty.
    pub(super) fn of_the_loader() -> Self {
        let first = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let first = env::split_paths(&first).filter(|folder| !folder.as_os_str().is_empty());
        let cached = ["/sbin/ldconfig", "/usr/sbin/ldconfig"].map(Path::new).into_iter();
        let cached = cached.filter(|path| path.exists()).find_map(|it| output(it, &["-p"]).ok());
        Self { first: first.collect(), cache: parsed(&cached.unwrap_or_default()) }
    }

    /// Returns the file that the loader would open under this name.
    fn loaded(&self, name: &str) -> Option<PathBuf> {
        let first = self.first.iter().map(PathBuf::as_path);
        let default = DEFAULT.iter().map(Path::new);
        in_folders(first, name)
            .or_else(|| self.cache.get(name).filter(|path| path.exists()).cloned())
            .or_else(|| in_folders(default, name))
    }
}

/// Parses names and paths from lines such as `\tlibm.so.6 (libc6,x86-64) =>
/// /lib/x86_64-linux-gnu/libm.so.6`. The first path of a name counts.
fn parsed(cache: &str) -> BTreeMap<String, PathBuf> {
    let mut paths = BTreeMap::new();
    for line in cache.lines() {
        let parts = line.trim().split_once(" => ");
        if let Some((name, path)) =
            parts.and_then(|(left, path)| Some((left.split_once(' ')?.0, path)))
        {
            paths.entry(name.to_owned()).or_insert_with(|| PathBuf::from(path));
        }
    }
    paths
}

fn in_folders<'a>(mut folders: impl Iterator<Item = &'a Path>, name: &str) -> Option<PathBuf> {
    folders.find_map(|folder| Some(folder.join(name)).filter(|path| path.exists()))
}

/// Looks for a library.
pub(super) fn find(sought: &Sought, places: &LoaderPlaces) -> DoctorFinding {
    let named = sought.variable.and_then(|variable| Some((variable, env::var_os(variable)?)));
    if let Some((variable, file)) = named {
        return of_variable(sought, variable, Path::new(&file), places);
    }
    if let Some(path) = sought.names.iter().find_map(|name| places.loaded(name)) {
        return found(sought, &path);
    }
    let usual = || USUAL.iter().map(Path::new);
    let aside = sought.names.iter().find_map(|name| in_folders(usual(), name));
    let Sought { key, what, names, advice, .. } = *sought;
    match aside {
        Some(path) => {
            let folder = path.parent().unwrap_or(Path::new("/")).display().to_string();
            let said = format!("{} is not where the loader looks", path.display());
            DoctorFinding::missing(key, what, said, &format!("add {folder} to LD_LIBRARY_PATH"))
        }
        None => DoctorFinding::missing(key, what, format!("no {}", names.join(", no ")), advice),
    }
}

/// Checks the file that a variable names. The loader looks for a bare name. Other files are not
/// tried.
fn of_variable(
    sought: &Sought,
    variable: &str,
    file: &Path,
    places: &LoaderPlaces,
) -> DoctorFinding {
    let is_name = file.components().count() == 1;
    let by_name = || places.loaded(&file.to_string_lossy());
    let there = if is_name { by_name() } else { Some(file.to_owned()).filter(|it| it.exists()) };
    match there {
        Some(path) => {
            DoctorFinding { said: Some(format!("by {variable}")), ..found(sought, &path) }
        }
        None => {
            let said = format!("{variable} is {}, which is not there", file.display());
            DoctorFinding::missing(sought.key, sought.what, said, "correct it, or unset it")
        }
    }
}

/// Describes a found library with its version. Installers name the file after the whole version,
/// and link the short names to it.
fn found(sought: &Sought, path: &Path) -> DoctorFinding {
    let file = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let version = name.split_once(".so.").map(|(_, version)| version.to_owned());
    let note = DoctorFinding::note(sought.key, sought.what);
    DoctorFinding {
        state: FindingState::Found,
        version,
        path: Some(file.display().to_string()),
        ..note
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_read_by_name() {
        let said = "2 libs found in cache `/etc/ld.so.cache'\n\
                    \tlibnccl.so.2 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libnccl.so.2\n\
                    \tlibnccl.so.2 (libc6) => /usr/lib/i386/libnccl.so.2\n";
        let cache = parsed(said);
        assert_eq!(cache.len(), 1);
        let expected = Path::new("/usr/lib/x86_64-linux-gnu/libnccl.so.2");
        assert_eq!(cache.get("libnccl.so.2").map(PathBuf::as_path), Some(expected));
    }
}
