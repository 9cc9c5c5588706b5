//! Writes the output of ranks to the terminal and to files.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use hsdp_train::{file, stderr};

use super::frame::{LauncherOrder, LineWindow, MAX_LINE, OutputStream, cost, send};
use super::start_thread;

/// The terminal and the log files. Lines are written one at a time.
///
/// If the reader of stdout or stderr blocks, the lines of ranks wait for it, and so do the ranks.
/// The launcher itself never waits: threads write its lines and those of the ranks, and a stream
/// that blocks does not delay the other one. If both streams are one file, one thread writes both,
/// so that no two lines are mixed.
#[derive(Debug)]
pub(super) struct Terminal {
    folder: Option<PathBuf>,
    /// Log files of this attempt.
    logs: Mutex<HashMap<String, File>>,
    stdout: Arc<LineWriter>,
    stderr: Arc<LineWriter>,
}

/// Time that stderr has to accept the last lines of the launcher.
const LAST_LINES: Duration = Duration::from_secs(1);

impl Terminal {
    /// Creates the terminal, with log files in `folder`, if there is one.
    ///
    /// # Errors
    /// The error of the system, which may have no thread or no open file left.
    pub(super) fn new(folder: Option<PathBuf>) -> io::Result<Self> {
        let one = files()?;
        let is_one = is_one_file(&one)?;
        // An error of stdout is reported on stderr, whose writer may not exist yet.
        let messages = Arc::<OnceLock<Arc<LineWriter>>>::default();
        let to = Arc::clone(&messages);
        let failed = move |error: io::Error| {
            let text = format!("cannot print to stdout: {error}: some output of the ranks is lost");
            if let Some(writer) = to.get() {
                writer.add(message(&text));
            }
        };
        let stdout = LineWriter::start(one, failed)?;
        let stderr = match is_one {
            true => Arc::clone(&stdout),
            false => LineWriter::start(files()?, |_| {})?,
        };
        let _ = messages.set(Arc::clone(&stderr));
        Ok(Self { folder, logs: Mutex::default(), stdout, stderr })
    }

    /// Creates the log files of an attempt: one for each rank, and one for the program that starts
    /// them. Overwrites the files of an earlier job.
    ///
    /// # Errors
    /// A text.
    pub(super) fn begin(
        &self,
        attempt: u32,
        ranks: u32,
        starter: Option<&str>,
    ) -> Result<(), String> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let folder = folder.join(format!("attempt-{attempt}"));
        fs::create_dir_all(&folder)
            .map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
        let mut logs = HashMap::new();
        let names = (0..ranks).map(|rank| (rank.to_string(), format!("rank-{rank}.log")));
        let starter = starter.map(|name| (name.to_owned(), format!("{name}.log")));
        for (who, name) in names.chain(starter) {
            let path = folder.join(name);
            let log = file::create_log(&path).map_err(|error| format!("cannot make {error}"))?;
            logs.insert(who, log);
        }
        *self.logs() = logs;
        Ok(())
    }

    /// Writes a line of a rank, or of the program that starts them, to its log, and queues it for
    /// the terminal. Does not wait for the terminal.
    pub(super) fn line(&self, who: &str, from: LineSource, stream: OutputStream, line: &[u8]) {
        self.log(who, line);
        let text = [b"[", who.as_bytes(), b"] ", line, b"\n"].concat();
        self.writer(stream).add(Waiting { stream, text, from, cost: cost(line) });
    }

    fn log(&self, who: &str, line: &[u8]) {
        let mut logs = self.logs();
        let Some(file) = logs.get_mut(who) else { return };
        if let Err(error) = file.write_all(&[line, b"\n"].concat()) {
            logs.remove(who);
            self.say(&format!("the log of [{who}] ends here: {error}"));
        }
    }

    /// Prints a line of the launcher itself. Does not wait for the terminal.
    pub(super) fn say(&self, line: &str) {
        self.stderr.add(message(line));
    }

    /// Returns the time since which lines of ranks have waited for a reader, the later one of the
    /// two streams. `None` if no line waits.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        self.stdout.waits_since().max(self.stderr.waits_since())
    }

    /// Gives up the lines of ranks on each stream for which `is_late` returns true. Its argument is
    /// the time since which they have waited.
    pub(super) fn give_up(&self, is_late: impl Fn(Instant) -> bool) {
        for writer in [&self.stdout, &self.stderr] {
            if writer.waits_since().is_some_and(&is_late) {
                writer.give_up();
            }
        }
    }

    /// Reports the number of lines lost since the last call, and returns it.
    pub(super) fn tell_lost(&self) -> u64 {
        let mut lost = self.stdout.take_lost();
        if !Arc::ptr_eq(&self.stdout, &self.stderr) {
            lost += self.stderr.take_lost();
        }
        if lost > 0 {
            let lines = if lost == 1 { "line" } else { "lines" };
            self.say(&format!("{lost} {lines} of output could not be written, and are lost"));
        }
        lost
    }

    /// Waits until all lines of the launcher are written, for at most a second.
    pub(super) fn finish(&self) {
        self.stderr.wait(Instant::now() + LAST_LINES);
    }

    fn writer(&self, stream: OutputStream) -> &LineWriter {
        match stream {
            OutputStream::Stdout => &self.stdout,
            OutputStream::Stderr => &self.stderr,
        }
    }

    fn logs(&self) -> MutexGuard<'_, HashMap<String, File>> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a line of the launcher.
fn message(text: &str) -> Waiting {
    let text = stderr::in_one_line(format_args!("hsdp: {text}")) + "\n";
    Waiting {
        stream: OutputStream::Stderr,
        text: text.into_bytes(),
        from: LineSource::Launcher,
        cost: 0,
    }
}

/// Returns the streams without the buffer and the lock of the standard library. A thread that
/// blocks in a write would hold them forever.
fn files() -> io::Result<StreamFiles> {
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    Ok(StreamFiles { stdout, stderr })
}

fn is_one_file(files: &StreamFiles) -> io::Result<bool> {
    let stdout = files.stdout.metadata()?;
    let stderr = files.stderr.metadata()?;
    Ok((stdout.dev(), stdout.ino()) == (stderr.dev(), stderr.ino()))
}

/// Pause when a nonblocking stream has no room.
const PAUSE: Duration = Duration::from_millis(10);

/// A line that waits to be written.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) stream: OutputStream,
    /// The line with its newline.
    pub(super) text: Vec<u8>,
    pub(super) from: LineSource,
    /// Number of bytes that it takes of its source's window.
    pub(super) cost: usize,
}

impl Waiting {
    /// Permits the source to send more. Must be called for each line, written or not.
    fn taken(self) {
        match self.from {
            LineSource::Launcher => {}
            LineSource::Rank(credit) => credit.add(self.cost),
            LineSource::Starter(window) => window.give(self.cost),
        }
    }
}

/// The origin of a line.
#[derive(Clone, Debug)]
pub(super) enum LineSource {
    /// The launcher itself.
    Launcher,
    /// A rank. Its attendant sends more lines when this one is written.
    Rank(Arc<Credit>),
    /// The program that starts the ranks.
    Starter(Arc<LineWindow>),
}

impl LineSource {
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
        let _ = send(&*self.orders, &LauncherOrder::Taken(number));
    }
}

/// Writer of one or both streams.
#[derive(Debug)]
pub(super) struct LineWriter {
    state: Mutex<WriterState>,
    changed: Condvar,
}

#[derive(Debug)]
struct WriterState {
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
pub(super) struct StreamFiles {
    pub(super) stdout: File,
    pub(super) stderr: File,
}

/// Maximum number of the launcher's own lines that wait. Further ones are dropped.
const MOST_OWN: usize = 1024;

impl LineWriter {
    /// Starts the thread. It calls `failed` with the first error of stdout.
    ///
    /// # Errors
    /// The error of the system, which may have no thread.
    pub(super) fn start(
        files: StreamFiles,
        failed: impl Fn(io::Error) + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let state = WriterState {
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
        start_thread(move || {
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
    fn add(&self, line: Waiting) {
        let mut state = self.lock();
        if line.from.is_launcher() {
            let own = state.waiting.iter().filter(|line| line.from.is_launcher()).count();
            if own >= MOST_OWN {
                return;
            }
        } else if state.given_up || (state.has_failed && line.stream == OutputStream::Stdout) {
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
    fn take_lost(&self) -> u64 {
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

    fn write_next(&self, files: &StreamFiles) {
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
            OutputStream::Stdout => &files.stdout,
            OutputStream::Stderr => &files.stderr,
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
                if line.stream == OutputStream::Stdout && !state.has_failed {
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

    fn lock(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WriterState {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.writing.is_none()
    }
}
