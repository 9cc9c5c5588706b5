//! The examples as programs.

mod bounds;
mod contrastive;
mod finetune;
mod folder;
mod place;
mod resume;
mod rows;
mod train_gpt;
mod warnings;

use std::process::{Command, Output};

/// Returns the command that runs an example. `cargo test` builds examples along with the tests.
fn example(name: &str) -> Command {
    Command::new(hsdp_train::testing::example(name))
}

/// Returns the stdout of a program that must have ended well.
fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}\n{}", output.status, stderr(output));
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
