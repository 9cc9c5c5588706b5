//! A bench as a program: its command line and its exit code.

use std::fmt::Display;
use std::process::ExitCode;

use clap::Parser;

/// Reads the command line, and calls `measure` with its options.
///
/// Prints one line and returns exit code 2 if the command line is invalid, and exit code 1 if the measurement fails.
#[expect(clippy::print_stderr, reason = "a command-line program")]
pub fn run<O: Parser, E: Display>(measure: impl FnOnce(O) -> Result<(), E>) -> ExitCode {
    let options = match O::try_parse() {
        Ok(options) => options,
        Err(error) if !error.use_stderr() => {
            drop(error.print());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{}", error.to_string().lines().next().unwrap_or_default());
            return ExitCode::from(2);
        }
    };
    match measure(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
