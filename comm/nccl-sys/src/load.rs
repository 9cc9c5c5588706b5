//! Loads NCCL, once for each process.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::library::Library;
use crate::{Error, Functions, Version, ncclConfig_t};

/// The variable that names the library.
const VARIABLE: &str = "HSDP_NCCL_LIBRARY";

/// The name that NCCL's packages install, and the name that its build adds.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// A loaded NCCL.
///
/// It stays loaded until the process ends: [`Functions`] holds plain pointers into it, and it has threads of its own
/// that run its code.
#[derive(Debug)]
pub struct Nccl {
    functions: Functions,
    version: Version,
    library: PathBuf,
}

impl Nccl {
    /// The process's NCCL. The first call loads it; all later calls return the same result, also if it is an error.
    ///
    /// If `$HSDP_NCCL_LIBRARY` is set, only that library is tried; otherwise `libnccl.so.2`, then `libnccl.so`. The
    /// first library that can be opened is taken. If it cannot be used, no other is tried.
    ///
    /// # Errors
    /// [`Error::NotFound`] if no library can be opened, with each that was tried; [`Error::MissingFunction`],
    /// [`Error::NoVersion`] or [`Error::TooOld`] if the library that was opened cannot be used.
    pub fn load() -> Result<&'static Self, Error> {
        static LOADED: OnceLock<Result<Nccl, Error>> = OnceLock::new();
        let load = || {
            // SAFETY: NC-1, the environment determines which library is NCCL, as for every library of the system.
            unsafe { Self::load_from(&names(env::var_os(VARIABLE))) }
        };
        LOADED.get_or_init(load).as_ref().map_err(Error::clone)
    }

    /// Loads the first of these libraries that can be opened: paths, or names that the system's loader knows. It is for
    /// programs that know the path of their library; other programs use [`load`](Self::load).
    ///
    /// # Errors
    /// As [`load`](Self::load).
    ///
    /// # Safety
    /// Opening a library runs its code. If it has functions with NCCL's names, they must be NCCL's functions.
    pub unsafe fn load_from<N: AsRef<Path>>(names: &[N]) -> Result<Self, Error> {
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: NC-1, the caller promises it.
            match unsafe { Library::open(name.as_ref()) } {
                Ok(library) => return Self::of(library),
                Err(attempt) => tried.push(attempt),
            }
        }
        Err(Error::NotFound { tried })
    }

    /// Checks the version first, so that an old library is reported as old and not as incomplete.
    fn of(library: Library) -> Result<Self, Error> {
        let version = library.version()?;
        if version < Version::OLDEST {
            let (found, needed) = (version, Version::OLDEST);
            return Err(Error::TooOld { library: library.name, found, needed });
        }
        Ok(Self { functions: Functions::found_in(&library)?, version, library: library.name })
    }

    /// Its functions.
    #[must_use]
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The library, as it was opened: a path, or a name that the system's loader knew.
    #[must_use]
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// Options of a communicator for this library, with everything left to NCCL ([`ncclConfig_t::fitting`]).
    #[must_use]
    pub fn config(&self) -> ncclConfig_t {
        ncclConfig_t::fitting(self.version)
    }
}

/// The libraries to try, given the value of the variable.
fn names(variable: Option<OsString>) -> Vec<OsString> {
    variable.map_or_else(|| NAMES.map(OsString::from).to_vec(), |library| vec![library])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_alone_names_the_library() {
        assert_eq!(names(Some("a/libnccl.so".into())), ["a/libnccl.so"]);
        assert_eq!(names(None), ["libnccl.so.2", "libnccl.so"]);
    }
}
