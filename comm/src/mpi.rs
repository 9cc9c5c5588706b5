//! Worlds whose ranks are processes under MPI. MPI carries their messages, and every reduction is done by this crate, so
//! results have the bits of ranks that are threads. `REMOTE.md`, beside the sources of this crate, describes the
//! messages and the use of MPI.
//!
//! In reading order: `error`, `library` (one function for each call of MPI), `transport` (messages),
//! `job` (the processes of a job, and their worlds).

mod error;
mod job;
mod library;
mod transport;

pub use self::error::MpiError;
pub use self::job::Job;
