//! A thread that writes lines to stdout or stderr, and the lines that wait for it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::frame::{MAX_LINE, Order, Stream};
use super::threads;
use super::window::Window;

/// Pause when a nonblocking stream has no room.
const PAUSE: Duration = Duration::from_millis(10);

/// A line that waits to be written.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) stream: Stream,
    /// The line with its newline.
    pub(super) text: Vec<u8>,
    pub(super) from: Source,
    /// Number of bytes that it takes of its source's window.
    pub(super) cost: usize,
}

impl Waiting {
    /// Permits the source to send more. Must be called for each line, written or not.
    fn taken(self) {
        match self.from {
            Source::Launcher => {}
            Source::Rank(credit) => credit.add(self.cost),
            Source::Starter(window) => window.give(self.cost),
        }
    }
}

/// The origin of a line.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// The launcher itself.
    Launcher,
    /// A rank. Its attendant sends more lines when this one is written.
    Rank(Arc<Credit>),
    /// The program that starts the ranks.
    Starter(Arc<Window>),
}

impl Source {
    fn is_launcher(&self) -> bool {
        matches!(self, Self::Launcher)
    }
}

/// Number of bytes of a rank's lines that were written, but not yet reported to its attendant.
#[derive(Debug)]
pub(super) struct Credit {
    orders: Arc<UnixStream>,
    owed: Mutex<usize>,
}

impl Credit {
    pub(super) fn of(orders: &Arc<UnixStream>) -> Self {
        Self { orders: Arc::clone(orders), owed: Mutex::new(0) }
    }

    /// Adds bytes. Holds a few back, so that at most a handful of orders is unread, and no send
    /// waits.
    fn add(&self, bytes: usize) {
        let mut owed = self.owed.lock().unwrap_or_else(PoisonError::into_inner);
        *owed += bytes;
        if *owed < MAX_LINE {
            return;
        }
        let number = u32::try_from(*owed).unwrap_or(u32::MAX);
        *owed = 0;
        // An attendant that cannot receive the order is already ending.
        let _ = Order::Taken(number).write_to(&*self.orders);
    }
}

/// Writer of one or both streams.
#[derive(Debug)]
pub(super) struct Writer {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<Waiting>,
    /// Whether a line is being written: `Some(true)` for one of the launcher's own.
    writing: Option<bool>,
    /// Time of the last write, or of the first line that waits after a time without lines.
    progress: Instant,
    /// Whether lines count as lost from now on, until the reader reads again.
    given_up: bool,
    /// Whether the line that is being written is counted as lost.
    is_counted: bool,
    /// Whether a count that includes that line was reported to the user.
    is_told: bool,
    /// Whether stdout has refused a line. It gets no further ones.
    has_failed: bool,
    /// Number of lines of ranks and of their starter that were not written.
    lost: u64,
    /// The first error of stdout that is not yet reported.
    failure: Option<io::Error>,
}

/// Files of the streams.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) stdout: File,
    pub(super) stderr: File,
}

/// Maximum number of the launcher's own lines that wait. Further ones are dropped.
const MOST_OWN: usize = 1024;

impl Writer {
    /// Starts the thread. It calls `failed` with the first error of stdout.
    ///
    /// # Errors
    /// The error of the system, which may have no thread.
    pub(super) fn start(
        files: Files,
        failed: impl Fn(io::Error) + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let state = State {
            waiting: VecDeque::new(),
            writing: None,
            progress: Instant::now(),
            given_up: false,
            is_counted: false,
            is_told: false,
            has_failed: false,
            lost: 0,
            failure: None,
        };
        let writer = Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() });
        let own = Arc::clone(&writer);
        threads::start(move || {
            loop {
                own.write_next(&files);
                let failure = own.lock().failure.take();
                if let Some(error) = failure {
                    failed(error);
                }
            }
        })?;
        Ok(writer)
    }

    /// Adds a line. Does not wait. Counts a line that is lost.
    pub(super) fn add(&self, line: Waiting) {
        let mut state = self.lock();
        if line.from.is_launcher() {
            let own = state.waiting.iter().filter(|line| line.from.is_launcher()).count();
            if own >= MOST_OWN {
                return;
            }
        } else if state.given_up || (state.has_failed && line.stream == Stream::Stdout) {
            state.lost += 1;
            drop(state);
            return line.taken();
        }
        if state.is_idle() {
            state.progress = Instant::now();
        }
        state.waiting.push_back(line);
        self.changed.notify_all();
    }

    /// Returns the time since which lines of ranks have waited for the reader. `None` if no line
    /// waits.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        let state = self.lock();
        let is_behind = state.writing == Some(false) && !state.is_counted
            || state.waiting.iter().any(|line| !line.from.is_launcher());
        is_behind.then_some(state.progress)
    }

    /// Counts all waiting lines of ranks as lost, and those that follow, until the reader reads
    /// again.
    pub(super) fn give_up(&self) {
        let mut state = self.lock();
        let (own, lost): (VecDeque<_>, VecDeque<_>) =
            state.waiting.drain(..).partition(|line| line.from.is_launcher());
        state.waiting = own;
        state.lost += lost.len() as u64;
        if state.writing == Some(false) && !state.is_counted {
            state.lost += 1;
            state.is_counted = true;
        }
        state.given_up = state.writing.is_some();
        drop(state);
        lost.into_iter().for_each(Waiting::taken);
    }

    /// Returns the number of lines lost since the last call.
    pub(super) fn take_lost(&self) -> u64 {
        let mut state = self.lock();
        state.is_told = state.is_counted;
        std::mem::take(&mut state.lost)
    }

    /// Waits until all lines are written, at most until `until`.
    pub(super) fn wait(&self, until: Instant) {
        let mut state = self.lock();
        while !state.is_idle() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn write_next(&self, files: &Files) {
        let mut state = self.lock();
        let line = loop {
            if let Some(line) = state.waiting.pop_front() {
                break line;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.writing = Some(line.from.is_launcher());
        drop(state);
        let file = match line.stream {
            Stream::Stdout => &files.stdout,
            Stream::Stderr => &files.stderr,
        };
        let written = self.write(file, &line.text);
        let mut state = self.lock();
        state.writing = None;
        let was_counted = std::mem::take(&mut state.is_counted);
        let was_told = std::mem::take(&mut state.is_told);
        match written {
            // The reader has read again in time.
            Ok(()) if was_counted && !was_told => state.lost = state.lost.saturating_sub(1),
            Ok(()) => {}
            // The reader has read enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => {
                if !was_counted && !line.from.is_launcher() {
                    state.lost += 1;
                }
                if line.stream == Stream::Stdout && !state.has_failed {
                    state.has_failed = true;
                    state.failure = Some(error);
                }
            }
        }
        drop(state);
        line.taken();
        self.changed.notify_all();
    }

    /// Writes a line. If the stream is nonblocking, waits for room here.
    fn write(&self, mut file: &File, mut text: &[u8]) -> io::Result<()> {
        while !text.is_empty() {
            match file.write(text) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    text = &text[written..];
                    let mut state = self.lock();
                    state.progress = Instant::now();
                    state.given_up = false;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    thread::park_timeout(PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.writing.is_none()
    }
}
