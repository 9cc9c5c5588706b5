//! Messages between an attendant and the launcher over their socket.
//!
//! The attendant sends frames, and the launcher sends orders. Both are this program, so the format
//! of messages may change with it.
//!
//! The launcher always reads. An attendant has sent at most [`WINDOW`] bytes of lines that the
//! launcher has not yet written, so the launcher learns of the end of a command even if the reader
//! of its output blocks.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::Child;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::supervisor::ProcessEnd;

/// A message of an attendant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum AttendantFrame {
    /// Attempt and rank of the attendant, in the first frame.
    Hello { attempt: u32, rank: u32 },
    /// A line that the command wrote, without its newline.
    Line(OutputStream, Vec<u8>),
    /// End of the command. Lines that it has written may follow.
    Ended(ProcessEnd),
    /// End of all lines, in the last frame.
    Drained,
}

/// Stream to which a line was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum OutputStream {
    Stdout,
    Stderr,
}

/// A message of the launcher to an attendant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum LauncherOrder {
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

/// Maximum number of bytes in a line. Longer lines are cut.
pub(super) const MAX_LINE: usize = 64 << 10;

/// Maximum number of bytes in lines between an attendant and the reader of the launcher's output. A
/// line fits even while the launcher holds back credit and another line is being written.
const WINDOW: usize = 4 * MAX_LINE;

/// Returns the bytes that a line takes of the window. An empty line takes memory, too.
pub(super) fn cost(line: &[u8]) -> usize {
    line.len() + 64
}

/// Maximum number of bytes of a message: a line with its kind, stream and length.
const MAX_MESSAGE: usize = MAX_LINE + 16;

/// Sends a message: its length in four bytes, then itself.
///
/// # Errors
/// The error of the system.
pub(super) fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let body = postcard::to_allocvec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    to.write_all(&[&length.to_le_bytes()[..], &body].concat())
}

/// Receives the next message.
///
/// # Errors
/// The error of the system, `UnexpectedEof` at the end; `InvalidData` if it is not a valid message.
pub(super) fn receive<T: DeserializeOwned>(mut from: impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    match postcard::take_from_bytes(&body) {
        Ok((message, [])) => Ok(message),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Calls `line` with each line, without its newline, as soon as it is complete. Cuts a line that is
/// too long. The last line needs no newline.
///
/// # Errors
/// The error of reading, or the error of `line`.
pub(super) fn each_line(
    from: impl Read,
    mut line: impl FnMut(Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    let mut from = BufReader::new(from);
    let mut was_cut = false;
    loop {
        let mut whole = Vec::new();
        let len = from.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut whole)?;
        if len == 0 {
            return Ok(());
        }
        let is_complete = whole.pop_if(|last| *last == b'\n').is_some();
        // A newline right after a cut ends the line that was cut.
        if !(was_cut && is_complete && whole.is_empty()) {
            line(whole)?;
        }
        was_cut = !is_complete;
    }
}

/// Takes the pipes that a child writes to.
pub(super) fn pipes_of(child: &mut Child) -> Vec<(OutputStream, Box<dyn Read + Send>)> {
    let stdout = child.stdout.take().map(|it| (OutputStream::Stdout, Box::new(it) as _));
    let stderr = child.stderr.take().map(|it| (OutputStream::Stderr, Box::new(it) as _));
    stdout.into_iter().chain(stderr).collect()
}

/// Waits until a child has ended. Does not reap it, so its pid stays valid.
pub(super) fn await_end(child: Pid) {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    while let Err(nix::Error::EINTR) = waitid(Id::Pid(child), flags) {}
}

/// Free part of [`WINDOW`].
#[derive(Debug)]
pub(super) struct LineWindow {
    free: Mutex<Option<usize>>,
    changed: Condvar,
}

impl LineWindow {
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
            AttendantFrame::Hello { attempt: 3, rank: 70_000 },
            AttendantFrame::Line(OutputStream::Stdout, b"half a loaf".to_vec()),
            AttendantFrame::Line(OutputStream::Stderr, Vec::new()),
            AttendantFrame::Ended(ProcessEnd::Code(-1)),
            AttendantFrame::Ended(ProcessEnd::Signal(9)),
            AttendantFrame::Drained,
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| send(&mut bytes, frame).expect("written"));
        let mut rest = &*bytes;
        for frame in frames {
            assert_eq!(receive::<AttendantFrame>(&mut rest).expect("a frame"), frame);
        }
        let end = receive::<AttendantFrame>(rest).expect_err("no more");
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_frame_is_refused_before_it_is_read() {
        for bytes in [
            // Cut off.
            &b"\x03\0\0\0\0"[..],
            // Longer than any message.
            b"\xff\xff\xff\xff\x03",
            // Without a kind, of an unknown kind, and with a byte too many.
            b"\0\0\0\0",
            b"\x01\0\0\0\x07",
            b"\x02\0\0\0\x03\0",
        ] {
            assert!(receive::<AttendantFrame>(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn orders_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        let orders = [
            LauncherOrder::Begin,
            LauncherOrder::Signal(15),
            LauncherOrder::Taken(70_000),
            LauncherOrder::Leave,
            LauncherOrder::Refuse,
        ];
        orders.iter().for_each(|order| send(&mut bytes, order).expect("written"));
        let mut rest = &*bytes;
        assert_eq!(orders.map(|_| receive::<LauncherOrder>(&mut rest).expect("an order")), orders);
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
        let mut text = vec![b'x'; MAX_LINE];
        text.extend(b"\n\ny\n");
        let lens: Vec<usize> = lines(&text).iter().map(Vec::len).collect();
        assert_eq!(lens, [MAX_LINE, 0, 1]);
    }
}
