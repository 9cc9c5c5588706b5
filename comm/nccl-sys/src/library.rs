//! A library that was opened, and its functions by name.

use std::mem::ManuallyDrop;
use std::os::raw::c_int;
use std::path::{Path, PathBuf};

use crate::{Attempt, Error, Version, ncclResult_t};

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
