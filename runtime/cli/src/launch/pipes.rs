//! The pipes of a command. An attendant sends their lines to the launcher.

use std::io::{self, Read};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use super::attendant::{Words, say};
use super::frame::{Frame, Stream, cost};
use super::window::Window;
use super::{lines, threads};

/// Time that the pipes of a command that has ended may stay open and empty. A process that left the
/// command's group may still hold them.
const DRAINING: Duration = Duration::from_secs(2);

/// Interval between checks of the pipes of a command that has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Threads that read the pipes of a command.
pub(super) struct Pipes {
    /// Channel without messages. It closes when the threads end.
    drained: Receiver<()>,
    /// Number of threads that are sending a line. The others read.
    sending: Arc<AtomicUsize>,
}

impl Pipes {
    /// Sends all lines that the command writes, while the window has room for them.
    pub(super) fn of(child: &mut Child, words: &Words, window: &Arc<Window>) -> io::Result<Self> {
        let (open, drained) = mpsc::channel::<()>();
        let sending = Arc::<AtomicUsize>::default();
        let pipe = |stream, pipe: Option<Box<dyn Read + Send>>| pipe.map(|pipe| (stream, pipe));
        let stdout = child.stdout.take().map(|it| Box::new(it) as _);
        let stderr = child.stderr.take().map(|it| Box::new(it) as _);
        let pipes = [pipe(Stream::Stdout, stdout), pipe(Stream::Stderr, stderr)];
        for (stream, from) in pipes.into_iter().flatten() {
            let (words, open, sending) = (Arc::clone(words), open.clone(), Arc::clone(&sending));
            let window = Arc::clone(window);
            threads::start(move || {
                // If the launcher has died, the group is killed.
                let _ = lines::each(from, |line| {
                    sending.fetch_add(1, Ordering::Relaxed);
                    let sent = match window.take(cost(&line)) {
                        true => say(&words, &Frame::Line(stream, line)),
                        false => Err(io::ErrorKind::BrokenPipe.into()),
                    };
                    sending.fetch_sub(1, Ordering::Relaxed);
                    sent
                });
                drop(open);
            })?;
        }
        Ok(Self { drained, sending })
    }

    /// Waits up to `most` until all lines of a command that has ended are sent. Returns whether
    /// they are.
    pub(super) fn wait_shortly(&self, most: Duration) -> bool {
        self.drained.recv_timeout(most) == Err(RecvTimeoutError::Disconnected)
    }

    /// Waits until all lines of a command that has ended are sent.
    ///
    /// While a thread sends, lines of the command may still be in its pipe, even if the reader of
    /// the launcher's output blocks for long. So only the time counts in which all threads wait for
    /// bytes that only a process left behind could write.
    pub(super) fn wait_for_lines(self) {
        let mut empty = Duration::ZERO;
        while empty < DRAINING {
            match self.drained.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) if self.sending.load(Ordering::Relaxed) == 0 => {
                    empty += LOOK;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}
