//! Why NCCL cannot be used.

use std::fmt;
use std::os::raw::c_int;
use std::path::PathBuf;

use crate::{Version, ncclResult_t};

/// An error of loading NCCL. What NCCL itself returns is an [`ncclResult_t`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No library could be opened. Install NCCL, or have `$HSDP_NCCL_LIBRARY` name it.
    #[error("NCCL cannot be loaded: {}", List(.tried))]
    NotFound {
        /// Each library that was tried, in order.
        tried: Vec<Attempt>,
    },
    /// A library was opened that is not NCCL, or lacks what every NCCL has since [`Version::OLDEST`].
    #[error("NCCL cannot be used: {} has no function {symbol}: {reason}", .library.display())]
    MissingFunction {
        /// As it was opened.
        library: PathBuf,
        /// The first one that it lacks.
        symbol: &'static str,
        /// What the system says.
        reason: String,
    },
    /// A library does not say which version it is.
    #[error("NCCL cannot be used: ncclGetVersion of {} returned {status} and wrote {code}", .library.display())]
    NoVersion {
        /// As it was opened.
        library: PathBuf,
        /// What was returned.
        status: ncclResult_t,
        /// What was written.
        code: c_int,
    },
    /// The library is too old.
    #[error("NCCL cannot be used: {} is version {found}, at least {needed} is needed", .library.display())]
    TooOld {
        /// As it was opened.
        library: PathBuf,
        /// Its version.
        found: Version,
        /// The oldest that would do.
        needed: Version,
    },
}

/// A library that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// As it was tried. A name without a slash is looked for by the system's loader.
    pub library: PathBuf,
    /// What the system says.
    pub reason: String,
}

struct List<'a>(&'a [Attempt]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no library was named");
        }
        for (index, Attempt { library, reason }) in self.0.iter().enumerate() {
            let between = if index == 0 { "" } else { "; " };
            write!(f, "{between}{}: {reason}", library.display())?;
        }
        Ok(())
    }
}
