//! Messages on stderr.

use std::fmt::Display;
use std::io::{self, Write as _};

/// Prints a message of a program to stderr. An error of stderr cannot be reported anywhere, and is ignored.
pub fn tell(program: &str, message: impl Display) {
    // In one write, so that messages of several processes are not mixed.
    let text = format!("{program}: {message}\n");
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// The text with escapes in place of its control characters, newlines included.
pub(crate) fn in_one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        match character.is_control() {
            true => line.extend(character.escape_default()),
            false => line.push(character),
        }
    }
    line
}
