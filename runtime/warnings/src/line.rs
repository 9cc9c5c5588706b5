//! Formats texts in one line of bounded length.

use std::fmt::{self, Display, Write as _};

/// Returns the text with escapes in place of its control characters, newlines included.
#[must_use]
pub fn in_one_line(text: impl Display) -> String {
    cut(text, usize::MAX)
}

/// Returns the text as [`in_one_line`] does, but cuts it after `most` characters, and marks the cut
/// with three points.
#[must_use]
pub fn cut(text: impl Display, most: usize) -> String {
    let mut line = Line { text: String::new(), left: most };
    // Writing stops with an error where the text is cut.
    match write!(line, "{text}") {
        Ok(()) => line.text,
        Err(fmt::Error) => line.text + "...",
    }
}

/// A line, and the number of characters that may follow.
struct Line {
    text: String,
    left: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            self.left = self.left.checked_sub(1).ok_or(fmt::Error)?;
            match character.is_control() {
                true => self.text.extend(character.escape_default()),
                false => self.text.push(character),
            }
        }
        Ok(())
    }
}
