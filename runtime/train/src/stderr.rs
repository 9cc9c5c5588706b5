//! Messages on stderr. Control characters, which could end a line or change the terminal, are shown
//! as escapes.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::iter;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

pub use hsdp_warnings::in_one_line;

/// Prints a message of a program to stderr, as one line. Ignores an error of stderr, which could be
/// reported nowhere.
pub fn tell(program: &str, message: impl Display) {
    tell_with(program, message, "");
}

/// Prints a message as [`tell`] does, and the lines of a longer text below it.
pub fn tell_with(program: &str, message: impl Display, text: &str) {
    // One write, so that messages of several processes do not mix.
    let _ = io::stderr().lock().write_all(lines(program, message, text).as_bytes());
}

/// Prints a message as [`tell`] does, but returns after `most` even if the reader of stderr blocks.
/// In that case the message may be printed later or never.
pub fn tell_within(program: &str, message: impl Display, most: Duration) {
    let program = program.to_owned();
    let message = message.to_string();
    let (done, told) = mpsc::channel();
    let started = thread::Builder::new().spawn(move || {
        tell(&program, message);
        let _ = done.send(());
    });
    if started.is_ok() {
        let _ = told.recv_timeout(most);
    }
}

fn lines(program: &str, message: impl Display, text: &str) -> String {
    let first = in_one_line(format_args!("{program}: {message}"));
    let rest = text.lines().map(in_one_line);
    iter::once(first).chain(rest).map(|line| line + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::lines;

    #[test]
    fn a_message_is_one_line_and_no_control_character_is_written() {
        let written = lines("p", "a\nb\u{1b}[2J\u{9b}", "first\r\nsec\tond\u{7}");
        assert_eq!(written, "p: a\\nb\\u{1b}[2J\\u{9b}\nfirst\nsec\\tond\\u{7}\n");
    }
}
