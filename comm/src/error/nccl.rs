//! Errors of NCCL.

use std::ffi::CStr;
use std::os::raw::c_char;

use hsdp_kernels::cuda::CudaError;
use nccl_sys::{Nccl, ncclComm_t, ncclResult_t};
use thiserror::Error;

/// An error of NCCL, or of the device under it.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum NcclError {
    /// NCCL cannot be loaded.
    #[error("{reason}")]
    Missing {
        /// The libraries that were tried, and why each failed.
        reason: String,
    },
    /// NCCL refused a call, or reports an error of an operation that was issued before.
    #[error(
        "{operation} of rank {rank} of {size}: NCCL says {status}, {meaning}; its last error: {last}"
    )]
    Refused {
        /// The operation.
        operation: &'static str,
        /// The rank in its communicator.
        rank: usize,
        /// Ranks of the communicator.
        size: usize,
        /// The status.
        status: String,
        /// The text of NCCL for this status.
        meaning: String,
        /// The text of NCCL about its last error.
        last: String,
    },
    /// A rank did not arrive, or did not do its part, in time. The communicator is aborted.
    #[error(
        "{operation} of rank {rank} of {size} was not done in {waited_ms} ms: another rank has not arrived, or hangs"
    )]
    Late {
        /// The operation that was waited for.
        operation: &'static str,
        /// The rank in its communicator.
        rank: usize,
        /// Ranks of the communicator.
        size: usize,
        /// The time of the wait, in milliseconds.
        waited_ms: u128,
    },
    /// Buffers do not fit each other or the communicator. Nothing was issued.
    #[error("{operation} of rank {rank} of {size}: {problem}")]
    Mismatch {
        /// The operation.
        operation: &'static str,
        /// The rank in its communicator.
        rank: usize,
        /// Ranks of the communicator.
        size: usize,
        /// The problem, with its numbers.
        problem: String,
    },
    /// The communicator was aborted before.
    #[error("{operation} of rank {rank} of {size}: the communicator was aborted")]
    GivenUp {
        /// The operation.
        operation: &'static str,
        /// The rank in its communicator.
        rank: usize,
        /// Ranks of the communicator.
        size: usize,
    },
    /// The thread that watches the communicators could not be started.
    #[error("no thread watches the communicators: {reason}")]
    Unwatched {
        /// The error of the system.
        reason: String,
    },
    /// Another rank failed while all ranks connected. The error on that rank has the reason.
    #[error("another rank could not connect")]
    Elsewhere,
    /// An error of the device.
    #[error(transparent)]
    Device(#[from] CudaError),
}

/// The texts of NCCL about a status, and about its last error.
pub(crate) fn texts(nccl: &Nccl, comm: ncclComm_t, status: ncclResult_t) -> (String, String) {
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
