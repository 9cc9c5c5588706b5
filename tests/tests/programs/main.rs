//! Programs of this package and an example, run as a user runs them.

mod conformance;
mod embed;
mod golden;
mod verify;
