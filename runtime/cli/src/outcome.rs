//! The exit codes of the program, and its output.

use std::io::{self, Write as _};
use std::process::ExitCode;

/// The result of a command that could be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Success.
    Well,
    /// Checkpoints are broken or differ, and the output says so.
    Wrong,
    /// The launched ranks have ended with this exit code.
    #[cfg(unix)]
    Ended(u8),
}

/// Prints to stderr why a command was not carried out, on one line, whatever names the reason quotes.
pub(crate) fn refuse(why: &str) -> ExitCode {
    let escaped =
        |it: char| if it.is_control() { it.escape_debug().to_string() } else { it.into() };
    let why: String = why.chars().map(escaped).collect();
    // An error of stderr cannot be reported anywhere.
    let _ = writeln!(io::stderr().lock(), "hsdp: {why}");
    ExitCode::from(2)
}

/// Prints text to stdout.
///
/// # Errors
/// The error of the system. A closed pipe is not an error, since its reader has read enough.
pub(crate) fn print(text: &str) -> io::Result<()> {
    match writeln!(io::stdout().lock(), "{}", text.trim_end()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
