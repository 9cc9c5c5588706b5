//! Output on stdout.

use std::fmt::Display;
use std::io::{self, Write as _};

/// Stdout takes no more, for example because its disk is full.
#[derive(Debug, thiserror::Error)]
#[error("cannot print to stdout: {0}")]
pub struct PrintError(#[source] io::Error);

/// Prints text to stdout, with one newline after its last word, and returns when the system has it.
///
/// # Errors
/// [`PrintError`]. A closed pipe is no error, because its reader has read enough.
pub fn print(text: impl Display) -> Result<(), PrintError> {
    let text = text.to_string();
    write(format!("{}\n", text.trim_end()).as_bytes())
}

/// Writes bytes to stdout, and returns when the system has them.
///
/// # Errors
/// As [`print()`].
pub fn write(bytes: &[u8]) -> Result<(), PrintError> {
    let mut out = io::stdout().lock();
    unless_closed(out.write_all(bytes).and_then(|()| out.flush()))
}

pub(crate) fn unless_closed(printed: io::Result<()>) -> Result<(), PrintError> {
    match printed {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(PrintError),
    }
}
