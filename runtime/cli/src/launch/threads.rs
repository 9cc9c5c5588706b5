//! Threads that run beside the main thread until their work ends.

use std::io;
use std::thread::Builder;

/// Starts a thread.
///
/// # Errors
/// The error of the system, which may have no thread or no memory left for one.
pub(super) fn start(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let started = Builder::new().spawn(work);
    started
        .map(drop)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot start a thread: {error}")))
}
