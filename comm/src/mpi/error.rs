//! What MPI refuses.

use std::time::Duration;

/// An error of MPI, or of how it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// A call failed.
    #[error("{call}: {message} (code {code})")]
    Call {
        /// The function.
        call: &'static str,
        /// Its code.
        code: i32,
        /// What MPI says of that code.
        message: String,
    },
    /// The library gives fewer guarantees to threads than are needed.
    #[error(
        "MPI serves threads at level {provided}, and level {needed} is needed (MPI_THREAD_SERIALIZED)"
    )]
    Threads {
        /// What it gives.
        provided: i32,
        /// What is needed.
        needed: i32,
    },
    /// MPI cannot be begun a second time.
    #[error("MPI was finalized in this process: keep the job for as long as worlds are made")]
    Finalized,
    /// A thread cannot be started.
    #[error("a thread for MPI could not be started: {problem}")]
    Thread {
        /// What the system says.
        problem: String,
    },
    /// Not all processes of the job have come.
    #[error("{call}: not all processes of the job came within {deadline:?}")]
    Late {
        /// What they were to come to.
        call: &'static str,
        /// How long was waited.
        deadline: Duration,
    },
    /// A process does not come to the end of the job: what it did ended early.
    #[error("MPI_Finalize: process {process} of the job ended early")]
    Early {
        /// Which of them.
        process: usize,
    },
}
