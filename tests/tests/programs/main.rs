//! Programs of this package and an example, run as a user runs them.

mod conformance;
#[cfg(unix)]
mod embed;
#[cfg(unix)]
mod verify;
