//! Errors of loading NCCL.

use std::os::raw::c_int;
use std::path::PathBuf;

use crate::{Version, ncclResult_t};

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
    /// The library that was opened is not NCCL, or lacks a function that every NCCL has since [`Version::OLDEST`].
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
