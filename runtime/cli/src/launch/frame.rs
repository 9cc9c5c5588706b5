//! Messages between an attendant and the launcher over their socket.
//!
//! The attendant sends frames: a byte for the kind, the length of the payload as four bytes, and
//! the payload. The launcher sends orders of one byte. [`Order::Taken`] also has a number of four
//! bytes.
//!
//! The launcher always reads. An attendant has sent at most [`WINDOW`] bytes of lines that the
//! launcher has not yet written, so the launcher learns of the end of a command even if the reader
//! of its output blocks.

use std::io::{self, Read, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::supervisor::End;

/// A message of an attendant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Attempt and rank of the attendant, in the first frame.
    Hello { attempt: u32, rank: u32 },
    /// A line that the command wrote, without its newline.
    Line(Stream, Vec<u8>),
    /// End of the command. Lines that it has written may follow.
    Ended(End),
    /// End of all lines, in the last frame.
    Drained,
}

/// Stream to which a line was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

/// A message of the launcher to an attendant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Run the command. This is the first order, if the launcher accepts the attendant.
    Begin,
    /// End without running the command, because the rank belongs to another attendant.
    Refuse,
    /// Send this signal to the command.
    Signal(i32),
    /// Send this number of further bytes in lines.
    Taken(u32),
    /// End with the command's exit code.
    Leave,
}

/// Maximum number of bytes in a line, and in a payload. Longer lines are cut, and longer payloads
/// are invalid.
pub(super) const MAX_LINE: usize = 64 << 10;

/// Maximum number of bytes in lines between an attendant and the reader of the launcher's output. A
/// line fits even while the launcher holds back credit and another line is being written.
const WINDOW: usize = 4 * MAX_LINE;

/// Returns the bytes that a line takes of the window. An empty line takes memory, too.
pub(super) fn cost(line: &[u8]) -> usize {
    line.len() + 64
}

const HELLO: u8 = b'H';
const STDOUT: u8 = b'o';
const STDERR: u8 = b'e';
const CODE: u8 = b'C';
const SIGNAL: u8 = b'S';
const DRAINED: u8 = b'D';

/// Orders have numbers that are no signals.
const LEAVE: u8 = 0;
const TAKEN: u8 = 253;
const BEGIN: u8 = 254;
const REFUSE: u8 = 255;

impl Frame {
    pub(super) fn write_to(&self, mut to: impl Write) -> io::Result<()> {
        let (kind, payload) = match self {
            Self::Hello { attempt, rank } => {
                (HELLO, [attempt.to_le_bytes(), rank.to_le_bytes()].concat())
            }
            Self::Line(Stream::Stdout, line) => (STDOUT, line.clone()),
            Self::Line(Stream::Stderr, line) => (STDERR, line.clone()),
            Self::Ended(End::Code(code)) => (CODE, code.to_le_bytes().to_vec()),
            Self::Ended(End::Signal(signal)) => (SIGNAL, signal.to_le_bytes().to_vec()),
            Self::Drained => (DRAINED, Vec::new()),
        };
        let len = u32::try_from(payload.len()).map_err(io::Error::other)?;
        let mut bytes = vec![kind];
        bytes.extend(len.to_le_bytes());
        bytes.extend(payload);
        to.write_all(&bytes)
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// The error of the system, `UnexpectedEof` at the end; `InvalidData` if it is not a valid
    /// frame.
    pub(super) fn read_from(mut from: impl Read) -> io::Result<Self> {
        let mut head = [0; 5];
        from.read_exact(&mut head)?;
        let [kind, len @ ..] = head;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_LINE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut payload = vec![0; len];
        from.read_exact(&mut payload)?;
        Self::parse(kind, payload).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn parse(kind: u8, payload: Vec<u8>) -> Option<Self> {
        let number = |bytes: &[u8]| bytes.try_into().ok().map(i32::from_le_bytes);
        match kind {
            HELLO if payload.len() == 8 => {
                let (attempt, rank) = payload.split_at(4);
                let unsigned = |bytes: &[u8]| bytes.try_into().ok().map(u32::from_le_bytes);
                Some(Self::Hello { attempt: unsigned(attempt)?, rank: unsigned(rank)? })
            }
            STDOUT => Some(Self::Line(Stream::Stdout, payload)),
            STDERR => Some(Self::Line(Stream::Stderr, payload)),
            CODE => Some(Self::Ended(End::Code(number(&payload)?))),
            SIGNAL => Some(Self::Ended(End::Signal(number(&payload)?))),
            DRAINED if payload.is_empty() => Some(Self::Drained),
            _ => None,
        }
    }
}

impl Order {
    pub(super) fn write_to(self, mut to: impl Write) -> io::Result<()> {
        let byte = match self {
            Self::Signal(signal) => u8::try_from(signal).map_err(io::Error::other)?,
            Self::Begin => BEGIN,
            Self::Refuse => REFUSE,
            Self::Taken(_) => TAKEN,
            Self::Leave => LEAVE,
        };
        let mut bytes = vec![byte];
        if let Self::Taken(number) = self {
            bytes.extend(number.to_le_bytes());
        }
        to.write_all(&bytes)
    }

    /// Reads the next order.
    ///
    /// # Errors
    /// The error of the system, `UnexpectedEof` at the end.
    pub(super) fn read_from(mut from: impl Read) -> io::Result<Self> {
        let mut byte = [0];
        from.read_exact(&mut byte)?;
        let [byte] = byte;
        Ok(match byte {
            BEGIN => Self::Begin,
            REFUSE => Self::Refuse,
            LEAVE => Self::Leave,
            TAKEN => {
                let mut number = [0; 4];
                from.read_exact(&mut number)?;
                Self::Taken(u32::from_le_bytes(number))
            }
            signal => Self::Signal(i32::from(signal)),
        })
    }
}

/// Calls `line` with each line, without its newline, as soon as it is complete. Cuts a line that is
/// too long. The last line needs no newline.
///
/// # Errors
/// The error of reading, or the error of `line`.
pub(super) fn each_line(
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

/// Free part of [`WINDOW`].
#[derive(Debug)]
pub(super) struct Window {
    free: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Window {
    /// Creates a window that is entirely free.
    pub(super) fn new() -> Self {
        Self { free: Mutex::new(Some(WINDOW)), changed: Condvar::new() }
    }

    /// Waits until a line of `bytes` bytes fits, and takes its room. Returns `false` if the window
    /// is closed.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let mut free = self.lock();
        loop {
            match *free {
                None => return false,
                Some(room) if room >= bytes => {
                    *free = Some(room - bytes);
                    return true;
                }
                Some(_) => {
                    free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Returns room to the window.
    pub(super) fn give(&self, bytes: usize) {
        let mut free = self.lock();
        *free = free.map(|room| room.saturating_add(bytes));
        self.changed.notify_all();
    }

    /// Ends all waits. Room is no longer returned.
    pub(super) fn close(&self) {
        *self.lock() = None;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written() {
        let frames = [
            Frame::Hello { attempt: 3, rank: 70_000 },
            Frame::Line(Stream::Stdout, b"half a loaf".to_vec()),
            Frame::Line(Stream::Stderr, Vec::new()),
            Frame::Ended(End::Code(-1)),
            Frame::Ended(End::Signal(9)),
            Frame::Drained,
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write_to(&mut bytes).expect("written"));
        let mut rest = &*bytes;
        for frame in frames {
            assert_eq!(Frame::read_from(&mut rest).expect("a frame"), frame);
        }
        assert_eq!(
            Frame::read_from(rest).expect_err("no more").kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn what_is_no_frame_is_refused_before_it_is_read() {
        for bytes in [
            &b"H\x08\0\0\0abc"[..],
            b"o\xff\xff\xff\xff",
            b"?\0\0\0\0",
            b"C\x01\0\0\0a",
            b"D\x01\0\0\0a",
        ] {
            assert!(Frame::read_from(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn orders_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        let orders =
            [Order::Begin, Order::Signal(15), Order::Taken(70_000), Order::Leave, Order::Refuse];
        orders.iter().for_each(|order| order.write_to(&mut bytes).expect("written"));
        let mut rest = &*bytes;
        assert_eq!(orders.map(|_| Order::read_from(&mut rest).expect("an order")), orders);
    }

    fn lines(text: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        each_line(text, |line| {
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
