//! The conventions that hsdp's programs share: `hsdp`, the examples and the conformance runner.
//!
//! Input is bounded in memory and time. Bad input is one line on stderr and exit code 2. Warnings of the libraries are lines on
//! stderr ([`Warnings`]). One run at a time writes to the folder of a run ([`FolderLock`]). Ranks that are processes compare
//! the digests of their inputs ([`Digest`]).

mod digest;
mod folder_lock;
mod warnings;

pub use digest::Digest;
pub use folder_lock::{FolderLock, LockError};
pub use warnings::Warnings;
