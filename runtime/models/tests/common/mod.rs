//! The examples as programs.

#![allow(dead_code, reason = "every test crate uses its own part of this")]

#[cfg(unix)]
pub(crate) mod place;

use std::process::Command;

/// Returns the command that runs an example. `cargo test` builds examples along with the tests.
pub(crate) fn example(name: &str) -> Command {
    Command::new(hsdp_train::testing::example(name))
}
