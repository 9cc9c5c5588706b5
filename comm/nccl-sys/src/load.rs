//! Loads NCCL and its functions, once for each process.
//!
//! "Called by all ranks" means: by every rank of the communicator, in the same order as other such
//! calls. Buffers are addresses that the communicator's GPU can reach, counts are elements.
//! Functions with a stream return when the work is enqueued.

use std::env;
use std::ffi::OsString;
use std::mem::ManuallyDrop;
use std::os::raw::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::declarations::{
    cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};
use crate::macros::{Function, Version};

/// The variable that names the library.
const VARIABLE: &str = "HSDP_NCCL_LIBRARY";

/// The name that NCCL's packages install, and the name that its build adds.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// A loaded NCCL.
///
/// It stays loaded until the process ends: [`Functions`] holds plain pointers into it, and it has
/// threads of its own that run its code.
#[derive(Debug)]
pub struct Nccl {
    functions: Functions,
    version: Version,
    library: PathBuf,
}

impl Nccl {
    /// The process's NCCL. The first call loads it; all later calls return the same result, also if
    /// it is an error.
    ///
    /// If `$HSDP_NCCL_LIBRARY` is set, only that library is tried; otherwise `libnccl.so.2`, then
    /// `libnccl.so`. The first library that can be opened is taken. If it cannot be used, no other
    /// is tried.
    ///
    /// # Errors
    /// [`Error::NotFound`] if no library can be opened, with each that was tried;
    /// [`Error::MissingFunction`], [`Error::NoVersion`] or [`Error::TooOld`] if the library that
    /// was opened cannot be used.
    pub fn load() -> Result<&'static Self, Error> {
        static LOADED: OnceLock<Result<Nccl, Error>> = OnceLock::new();
        let load = || {
            // SAFETY: NC-1, the environment determines which library is NCCL, as for every library
            // of the system.
            unsafe { Self::load_from(&names(env::var_os(VARIABLE))) }
        };
        LOADED.get_or_init(load).as_ref().map_err(Error::clone)
    }

    /// Loads the first of these libraries that can be opened: paths, or names that the system's
    /// loader knows. It is for programs that know the path of their library; other programs use
    /// [`load`](Self::load).
    ///
    /// # Errors
    /// As [`load`](Self::load).
    ///
    /// # Safety
    /// Opening a library runs its code. If it has functions with NCCL's names, they must be NCCL's
    /// functions.
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
            let found = version;
            let needed = Version::OLDEST;
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

    /// Options of a communicator for this library, with everything left to NCCL
    /// ([`ncclConfig_t::fitting`]).
    #[must_use]
    pub fn config(&self) -> ncclConfig_t {
        ncclConfig_t::fitting(self.version)
    }
}

/// The libraries to try, given the value of the variable.
fn names(variable: Option<OsString>) -> Vec<OsString> {
    variable.map_or_else(|| NAMES.map(OsString::from).to_vec(), |library| vec![library])
}

/// An open library. It is never closed: see [`Nccl`](crate::Nccl).
pub(crate) struct Library {
    /// The name with which it was opened.
    pub(crate) name: PathBuf,
    handle: ManuallyDrop<libloading::Library>,
}

impl Library {
    /// # Safety
    /// As [`Nccl::load_from`](crate::Nccl::load_from).
    pub(crate) unsafe fn open(name: &Path) -> Result<Self, Attempt> {
        let failed = |reason: String| Attempt { library: name.to_owned(), reason };
        if name.as_os_str().is_empty() {
            // The system would open the program itself.
            return Err(failed("an empty name".to_owned()));
        }
        // SAFETY: NC-1, the caller promises it.
        let handle = unsafe { libloading::Library::new(name) };
        let handle = handle.map_err(|error| failed(error.to_string()))?;
        Ok(Self { name: name.to_owned(), handle: ManuallyDrop::new(handle) })
    }

    /// The function of this name. `F` is its type.
    ///
    /// # Safety
    /// `F` must be the type of that function.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, Error> {
        let missing =
            |reason: String| Error::MissingFunction { library: self.name.clone(), symbol, reason };
        // SAFETY: NC-2, the caller promises it; an `Option` of a function may be null.
        let found = unsafe { self.handle.get::<Option<F>>(symbol) };
        // The pointer outlives the loan of the library: NC-3.
        let found = *found.map_err(|error| missing(error.to_string()))?;
        found.ok_or_else(|| missing("it is null".to_owned()))
    }

    pub(crate) fn version(&self) -> Result<Version, Error> {
        type GetVersion = unsafe extern "C" fn(version: *mut c_int) -> ncclResult_t;
        // SAFETY: NC-2, this is its type.
        let get_version = unsafe { self.function::<GetVersion>("ncclGetVersion") }?;
        let mut code = 0;
        // SAFETY: NC-2, it writes an int to the address that it gets.
        let status = unsafe { get_version(&raw mut code) };
        match u32::try_from(code) {
            Ok(code @ 1..) if status == ncclResult_t::ncclSuccess => Ok(Version::from_code(code)),
            _ => Err(Error::NoVersion { library: self.name.clone(), status, code }),
        }
    }
}

/// An error of loading NCCL. NCCL's own functions return an [`ncclResult_t`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No library could be opened. Install NCCL, or set `$HSDP_NCCL_LIBRARY` to its path.
    #[error("NCCL cannot be loaded: {}", list(.tried))]
    NotFound {
        /// Each library that was tried, in order.
        tried: Vec<Attempt>,
    },
    /// The library that was opened is not NCCL, or lacks a function that every NCCL has since
    /// [`Version::OLDEST`].
    #[error("NCCL cannot be used: {} has no function {symbol}: {reason}", .library.display())]
    MissingFunction {
        /// The library as it was opened.
        library: PathBuf,
        /// The first function that it lacks.
        symbol: &'static str,
        /// The error of the system.
        reason: String,
    },
    /// The library does not report its version.
    #[error("NCCL cannot be used: ncclGetVersion of {} returned {status} and wrote {code}", .library.display())]
    NoVersion {
        /// The library as it was opened.
        library: PathBuf,
        /// The status that was returned.
        status: ncclResult_t,
        /// The code that was written.
        code: c_int,
    },
    /// The library is too old.
    #[error("NCCL cannot be used: {} is version {found}, at least {needed} is needed", .library.display())]
    TooOld {
        /// The library as it was opened.
        library: PathBuf,
        /// Its version.
        found: Version,
        /// The oldest version that can be used.
        needed: Version,
    },
}

/// A library that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The library as it was tried. The system's loader searches for a name without a slash.
    pub library: PathBuf,
    /// The error of the system.
    pub reason: String,
}

fn list(tried: &[Attempt]) -> String {
    if tried.is_empty() {
        return "no library was named".to_owned();
    }
    let one = |Attempt { library, reason }: &Attempt| format!("{}: {reason}", library.display());
    tried.iter().map(one).collect::<Vec<_>>().join("; ")
}

functions! {
    /// Writes the code of the version ([`Version`](crate::Version)). Needs no GPU.
    ncclGetVersion(version: *mut c_int) -> ncclResult_t;
    /// Makes the id by which ranks find each other. Called by one rank, which sends the id to the
    /// others.
    ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t;
    /// Joins a communicator with options. Called by all its ranks.
    ncclCommInitRankConfig(
        comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int,
        config: *mut ncclConfig_t
    ) -> ncclResult_t;
    /// Ends a communicator's operations before it is destroyed. Called by all its ranks.
    ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
    /// Frees a communicator.
    ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
    /// Frees a communicator and aborts the operations that still run on it. Other ranks need not
    /// take part.
    ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
    /// Makes a communicator of all ranks with the same color, ordered by key. Called by all ranks
    /// of the parent.
    ncclCommSplit(
        comm: ncclComm_t, color: c_int, key: c_int, newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t
    ) -> ncclResult_t;
    /// A status in words: a string that lives as long as the process.
    ncclGetErrorString(result: ncclResult_t) -> *const c_char;
    /// The last error of NCCL in words; perhaps not of the last call. A later error may overwrite
    /// it.
    ncclGetLastError(comm: ncclComm_t) -> *const c_char;
    /// Writes the status of a communicator's operations so far.
    ncclCommGetAsyncError(
        comm: ncclComm_t, asyncError: *mut ncclResult_t
    ) -> ncclResult_t;
    /// Writes the number of ranks.
    ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t;
    /// Writes the rank of the caller.
    ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
    /// Reduces `count` elements of each rank into a buffer on every rank. Called by all ranks.
    ncclAllReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    /// Reduces n x `recvcount` elements of each of n ranks; each gets its own `recvcount`. Called
    /// by all ranks.
    ncclReduceScatter(
        sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    /// Copies `sendcount` elements of each rank to every rank, in order of rank. Called by all
    /// ranks.
    ncclAllGather(
        sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    /// Begins a group: the calls of this thread until its end are launched together.
    ncclGroupStart() -> ncclResult_t;
    /// Ends a group and enqueues its calls.
    ncclGroupEnd() -> ncclResult_t;
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
