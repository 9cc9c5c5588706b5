//! Writes to stderr that hold nothing up.

use std::io::{self, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

/// Maximum number of lines that wait for a reader who blocks. Later ones are dropped.
const MOST_WAITING: usize = 100;

/// Time that a line has to be written in before the reader counts as blocked.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether a line was not written in time, and none has been written since.
static BLOCKED: AtomicBool = AtomicBool::new(false);

struct Message {
    line: String,
    written: SyncSender<()>,
}

/// Writes a line to stderr. Errors of stderr cannot be reported anywhere, and are ignored.
///
/// A thread of its own writes, because a write to a full pipe has no deadline. The caller waits for
/// it, so that the line of a process that ends next is not lost.
pub(crate) fn write(line: String) {
    let Some(writer) = writer() else { return write_now(&line) };
    let (written, done) = mpsc::sync_channel(1);
    let is_waiting = writer.try_send(Message { line, written }).is_ok();
    if is_waiting
        && !BLOCKED.load(Ordering::Relaxed)
        && done.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout)
    {
        BLOCKED.store(true, Ordering::Relaxed);
    }
}

/// Returns the way to the thread that writes; `None` if it could not be started.
fn writer() -> Option<&'static SyncSender<Message>> {
    static WRITER: OnceLock<Option<SyncSender<Message>>> = OnceLock::new();
    let start = || {
        let (writer, messages) = mpsc::sync_channel::<Message>(MOST_WAITING);
        let write_all = move || {
            for Message { line, written } in messages {
                write_now(&line);
                BLOCKED.store(false, Ordering::Relaxed);
                let _ = written.try_send(());
            }
        };
        let name = "hsdp-warnings".to_owned();
        thread::Builder::new().name(name).spawn(write_all).ok().map(|_| writer)
    };
    WRITER.get_or_init(start).as_ref()
}

fn write_now(line: &str) {
    // In one write, so that lines of several processes are not mixed.
    let _ = io::stderr().lock().write_all(line.as_bytes());
}
