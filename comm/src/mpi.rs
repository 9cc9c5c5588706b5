//! The mpi flavour: ranks are processes, and MPI carries their letters. `REMOTE.md`, beside the sources of this crate, says what is
//! sent, and how MPI is used for it.
//!
//! In reading order: `error`, `library` (MPI itself, one call a function), `transport` (letters),
//! `job` (the processes of a job, and their worlds).

mod error;
mod job;
mod library;
mod transport;

pub use self::error::MpiError;
pub use self::job::Job;
