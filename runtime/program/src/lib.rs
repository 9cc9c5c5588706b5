#![doc = include_str!("../BOUNDS.md")]
//!
//! Warnings of the libraries are lines on stderr ([`Warnings`]). One run at a time writes to the folder of a run ([`FolderLock`]).
//! Ranks that are processes compare the digests of their inputs ([`Digest`]).

pub mod command_line;
mod digest;
pub mod failure;
pub mod file;
mod folder_lock;
pub mod memory;
pub mod number;
pub mod stderr;
pub mod stdout;
#[cfg(unix)]
pub mod testing;
pub mod threads;
mod warnings;

pub use self::digest::Digest;
pub use self::failure::{Failure, run};
pub use self::folder_lock::{FolderLock, LockError};
pub use self::stderr::{tell, tell_with, tell_within};
pub use self::stdout::{print, print_json};
pub use self::warnings::Warnings;
