//! Errors of MPI.

use std::time::Duration;

/// An error of MPI, or of its use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// A call of MPI failed.
    #[error("{call}: {message} (code {code})")]
    Call {
        /// The function.
        call: &'static str,
        /// The error code.
        code: i32,
        /// The text of MPI for that code.
        message: String,
    },
    /// The library supports a lower thread level than is needed.
    #[error("MPI provides {provided}, but {needed} is needed")]
    Threads {
        /// The name of the level that the library provides.
        provided: &'static str,
        /// The name of the level that is needed.
        needed: &'static str,
    },
    /// The program has initialized MPI itself, with a thread level that does not allow its own calls beside those of hsdp's progress
    /// thread.
    #[error(
        "the program has initialized MPI with {provided}, but {needed} is needed: hsdp's progress thread calls MPI at any time; \
         initialize MPI with {needed}, or leave that to hsdp"
    )]
    ProgramThreads {
        /// The name of the level that MPI provides.
        provided: &'static str,
        /// The name of the level that is needed.
        needed: &'static str,
    },
    /// MPI was finalized, and cannot be initialized again.
    #[error("MPI was finalized in this process: keep the job for as long as worlds are made")]
    Finalized,
    /// A thread could not be started.
    #[error("a thread for MPI could not be started: {problem}")]
    Thread {
        /// The error of the system.
        problem: String,
    },
    /// This process has no memory for a message that is to be received before the end of MPI.
    #[error("no memory for a message of {bytes} bytes that came at the end of MPI")]
    NoMemory {
        /// The length of the message.
        bytes: usize,
    },
    /// Not all processes of the job arrived at a call in time.
    #[error("{call}: not all processes of the job arrived within {deadline:?}")]
    Late {
        /// The function that all processes call.
        call: &'static str,
        /// The deadline.
        deadline: Duration,
    },
    /// A process does not reach the common end of the job, because one of its worlds ended early.
    #[error("MPI_Finalize: process {process} of the job ended early")]
    Early {
        /// The number of the process.
        process: usize,
    },
}
