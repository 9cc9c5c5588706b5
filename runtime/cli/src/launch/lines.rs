//! Splits bytes into lines.

use std::io::{self, Read};

use super::frame::MAX_LINE;

/// Calls `line` with each line, without its newline, as soon as it is complete. Cuts a line that is
/// too long. The last line needs no newline.
///
/// # Errors
/// The error of reading, or the error of `line`.
pub(super) fn each(
    mut from: impl Read,
    mut line: impl FnMut(Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    let mut open: Vec<u8> = Vec::new();
    let mut read = vec![0; 8 << 10];
    loop {
        let len = match from.read(&mut read) {
            Ok(0) => break,
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        open.extend(&read[..len]);
        while let Some(len) = end(&open) {
            let mut whole: Vec<u8> = open.drain(..len).collect();
            if whole.last() == Some(&b'\n') {
                whole.pop();
            }
            line(whole)?;
        }
    }
    if open.is_empty() { Ok(()) } else { line(open) }
}

/// Returns the length of the first line with its newline, or of the part at which a long line is
/// cut.
fn end(open: &[u8]) -> Option<usize> {
    let searched = &open[..open.len().min(MAX_LINE)];
    let line = searched.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
    line.or((open.len() > MAX_LINE).then_some(MAX_LINE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        each(text, |line| {
            lines.push(line);
            Ok(())
        })
        .expect("read");
        lines
    }

    #[test]
    fn lines_are_whole_and_the_last_needs_no_end() {
        assert_eq!(lines(b"one\n\ntwo\nthree"), [&b"one"[..], b"", b"two", b"three"]);
        assert!(lines(b"").is_empty());
        assert_eq!(lines(b"\xff\xfe\n"), [b"\xff\xfe"]);
    }

    #[test]
    fn what_never_ends_is_cut() {
        let long = vec![b'x'; 2 * MAX_LINE + 5];
        let lens: Vec<usize> = lines(&long).iter().map(Vec::len).collect();
        assert_eq!(lens, [MAX_LINE, MAX_LINE, 5]);
        let mut text = vec![b'x'; MAX_LINE - 1];
        text.extend(b"\ny\n");
        let lens: Vec<usize> = lines(&text).iter().map(Vec::len).collect();
        assert_eq!(lens, [MAX_LINE - 1, 1]);
    }
}
