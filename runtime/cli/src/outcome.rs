//! How the program ends, and what it says.

use std::io::{self, Write as _};
use std::process::ExitCode;

/// What came of a command that could be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All is well.
    Well,
    /// Something is broken, or differs, and was told.
    Wrong,
    /// What was run has ended with this exit code.
    #[cfg(unix)]
    Ended(u8),
}

/// Says why a command was not carried out.
pub(crate) fn refuse(why: &str) -> ExitCode {
    // Nobody is left to tell where stderr is gone.
    let _ = writeln!(io::stderr().lock(), "hsdp: {why}");
    ExitCode::from(2)
}

/// Prints text to stdout.
///
/// # Errors
/// What the system says; nothing where whoever reads has read enough.
pub(crate) fn print(text: &str) -> io::Result<()> {
    match writeln!(io::stdout().lock(), "{}", text.trim_end()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
