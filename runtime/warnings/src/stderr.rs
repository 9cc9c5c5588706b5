//! Writes to stderr without blocking for long.

use std::io::{self, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

/// Maximum number of lines that wait for a reader that blocks. Later lines are dropped.
const MOST_WAITING: usize = 100;

/// Time after which the reader of an unwritten line counts as blocked.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether a line was not written in time, and none has been written since.
static BLOCKED: AtomicBool = AtomicBool::new(false);

struct WaitingLine {
    line: String,
    written: SyncSender<()>,
}

/// Writes a line to stderr. Ignores errors of stderr, which could be reported nowhere.
///
/// A separate thread writes, because a write to a full pipe has no deadline. The caller waits for
/// it, so that the line is not lost if the process ends next.
pub(crate) fn write(line: String) {
    let Some(writer) = writer() else { return write_now(&line) };
    let (written, done) = mpsc::sync_channel(1);
    let is_waiting = writer.try_send(WaitingLine { line, written }).is_ok();
    if is_waiting
        && !BLOCKED.load(Ordering::Relaxed)
        && done.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout)
    {
        BLOCKED.store(true, Ordering::Relaxed);
    }
}

/// Returns the channel to the thread that writes. `None` if it could not be started.
fn writer() -> Option<&'static SyncSender<WaitingLine>> {
    static WRITER: OnceLock<Option<SyncSender<WaitingLine>>> = OnceLock::new();
    let start = || {
        let (writer, messages) = mpsc::sync_channel::<WaitingLine>(MOST_WAITING);
        let write_all = move || {
            for WaitingLine { line, written } in messages {
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
    // One write, so that lines of several processes do not mix.
    let _ = io::stderr().lock().write_all(line.as_bytes());
}
