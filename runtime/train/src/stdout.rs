//! Output on stdout.

use std::fmt::{Display, Write as _};
use std::io::{self, Write as _};

use comfy_table::{CellAlignment, Row, Table, presets};
use serde_json::Value;

/// An error in which stdout accepts no more output, for example because its disk is full.
#[derive(Debug, thiserror::Error)]
#[error("cannot print to stdout: {0}")]
pub struct PrintError(#[source] io::Error);

/// Prints text to stdout, ends it with one newline, and returns when the system has accepted it.
/// Control characters other than newlines and tabs are shown as escapes, because names in files
/// could change the terminal.
///
/// # Errors
/// [`PrintError`]. A closed pipe is no error, because its reader has read enough.
pub fn print(text: impl Display) -> Result<(), PrintError> {
    let text = escaped(&text.to_string(), |text, control| text.extend(control.escape_default()));
    write(format!("{}\n", text.trim_end()).as_bytes())
}

/// Prints JSON to stdout. All control characters in its strings are JSON escapes.
///
/// # Errors
/// The errors of [`print()`].
pub fn print_json(value: &Value) -> Result<(), PrintError> {
    // JSON leaves control characters above ASCII as they are.
    let text = escaped(&value.to_string(), |text, control| {
        let _ = write!(text, "\\u{:04x}", u32::from(control));
    });
    write(format!("{text}\n").as_bytes())
}

/// Returns a table with words in its first column and numbers in the others.
///
/// ```
/// let table = hsdp_train::stdout::table(["part", "bytes"], [["parameters", "4096"]]);
/// hsdp_train::print(table)?;
/// # Ok::<(), hsdp_train::stdout::PrintError>(())
/// ```
pub fn table(header: impl Into<Row>, rows: impl IntoIterator<Item: Into<Row>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header).add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Replaces each control character that is neither a newline nor a tab with the output of `escape`.
fn escaped(text: &str, escape: impl Fn(&mut String, char)) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character.is_control() && !matches!(character, '\n' | '\t') {
            true => escape(&mut shown, character),
            false => shown.push(character),
        }
    }
    shown
}

/// Writes bytes to stdout, and returns when the system has accepted them.
fn write(bytes: &[u8]) -> Result<(), PrintError> {
    let mut out = io::stdout().lock();
    unless_closed(out.write_all(bytes).and_then(|()| out.flush()))
}

pub(crate) fn unless_closed(printed: io::Result<()>) -> Result<(), PrintError> {
    match printed {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(PrintError),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::escaped;

    #[test]
    fn only_newlines_and_tabs_stay_of_control_characters() {
        let shown = escaped("a\tb\n\u{1b}[2J\u{9b}\r\u{7f}", |text, it| {
            text.extend(it.escape_default());
        });
        assert_eq!(shown, "a\tb\n\\u{1b}[2J\\u{9b}\\r\\u{7f}");
    }

    #[test]
    fn escapes_in_json_are_read_as_what_they_were() {
        let value = json!({ "a\u{1b}\n\u{9b}\u{7f}": "\u{85}" });
        let shown = escaped(&value.to_string(), |text, it| {
            text.push_str(&format!("\\u{:04x}", u32::from(it)));
        });
        assert!(!shown.chars().any(char::is_control), "{shown}");
        assert_eq!(serde_json::from_str::<Value>(&shown).expect("JSON"), value);
    }
}
