//! What can go wrong with NCCL.

use std::ffi::CStr;
use std::os::raw::c_char;

use hsdp_kernels::cuda::CudaError;
use nccl_sys::{Nccl, ncclComm_t, ncclResult_t};
use thiserror::Error;

/// Why NCCL, or the device under it, could not do what was asked.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum NcclError {
    /// NCCL cannot be loaded.
    #[error("{reason}")]
    Missing {
        /// What was tried, and why it failed.
        reason: String,
    },
    /// NCCL refuses a call, or reports an error of an operation that was issued before.
    #[error(
        "{operation} of rank {rank} of {size}: NCCL says {status}, {meaning}; its last error: {last}"
    )]
    Refused {
        /// What was called.
        operation: &'static str,
        /// The rank in its communicator.
        rank: usize,
        /// Ranks of the communicator.
        size: usize,
        /// The status.
        status: String,
        /// What NCCL says that it means.
        meaning: String,
        /// What NCCL says about its last error.
        last: String,
    },
    /// Ranks have not come, or not done their part, in time. The communicator is given up.
    #[error(
        "{operation} of rank {rank} of {size} was not done in {waited_ms} ms: another rank has not come, or hangs"
    )]
    Late {
        /// What was waited for.
        operation: &'static str,
        /// The rank in its communicator.
        rank: usize,
        /// Ranks of the communicator.
        size: usize,
        /// For how long it was waited, in milliseconds.
        waited_ms: u128,
    },
    /// Buffers do not fit each other or the communicator. Nothing was issued.
    #[error("{operation} of rank {rank} of {size}: {problem}")]
    Mismatch {
        /// What was called.
        operation: &'static str,
        /// The rank in its communicator.
        rank: usize,
        /// Ranks of the communicator.
        size: usize,
        /// What does not fit, with its numbers.
        problem: String,
    },
    /// The communicator was given up before.
    #[error("{operation} of rank {rank} of {size}: the communicator was given up")]
    GivenUp {
        /// What was called.
        operation: &'static str,
        /// The rank in its communicator.
        rank: usize,
        /// Ranks of the communicator.
        size: usize,
    },
    /// There is no thread to look after the communicators.
    #[error("nobody looks after the communicators: {reason}")]
    Unwatched {
        /// Why not.
        reason: String,
    },
    /// Another rank failed in what all do together; it says why.
    #[error("another rank could not connect")]
    Elsewhere,
    /// The device refuses.
    #[error(transparent)]
    Device(#[from] CudaError),
}

/// What NCCL says of a status, and of its last error.
pub(super) fn texts(nccl: &Nccl, comm: ncclComm_t, status: ncclResult_t) -> (String, String) {
    // SAFETY: NC-4, any number is a status.
    let meaning = unsafe { (nccl.functions().ncclGetErrorString)(status) };
    // SAFETY: NC-4, the communicator was not given up, or is null, which NCCL takes, too.
    let last = unsafe { (nccl.functions().ncclGetLastError)(comm) };
    (text(meaning), text(last))
}

fn text(of: *const c_char) -> String {
    if of.is_null() {
        return "nothing".to_owned();
    }
    // SAFETY: NC-4, NCCL's texts end in a zero and are not changed while this thread asks for none.
    unsafe { CStr::from_ptr(of) }.to_string_lossy().into_owned()
}
