//! Writes the output of ranks to the terminal and to files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use hsdp_train::{file, stderr};

use super::frame::{Stream, cost};
use super::writer::{Files, Source, Waiting, Writer};

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
    stdout: Arc<Writer>,
    stderr: Arc<Writer>,
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
        let messages = Arc::<OnceLock<Arc<Writer>>>::default();
        let to = Arc::clone(&messages);
        let failed = move |error: io::Error| {
            let text = format!("cannot print to stdout: {error}: some output of the ranks is lost");
            if let Some(writer) = to.get() {
                writer.add(message(&text));
            }
        };
        let stdout = Writer::start(one, failed)?;
        let stderr = match is_one {
            true => Arc::clone(&stdout),
            false => Writer::start(files()?, |_| {})?,
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
        fs::create_dir_all(&folder).map_err(|error| cannot_make(&folder, &error))?;
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
    pub(super) fn line(&self, who: &str, from: Source, stream: Stream, line: &[u8]) {
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

    fn writer(&self, stream: Stream) -> &Writer {
        match stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        }
    }

    fn logs(&self) -> MutexGuard<'_, HashMap<String, File>> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a line of the launcher.
fn message(text: &str) -> Waiting {
    let text = stderr::in_one_line(format_args!("hsdp: {text}")) + "\n";
    Waiting { stream: Stream::Stderr, text: text.into_bytes(), from: Source::Launcher, cost: 0 }
}

/// Returns the streams without the buffer and the lock of the standard library. A thread that
/// blocks in a write would hold them forever.
fn files() -> io::Result<Files> {
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    Ok(Files { stdout, stderr })
}

fn is_one_file(files: &Files) -> io::Result<bool> {
    let (stdout, stderr) = (files.stdout.metadata()?, files.stderr.metadata()?);
    Ok((stdout.dev(), stdout.ino()) == (stderr.dev(), stderr.ino()))
}

fn cannot_make(path: &Path, error: &io::Error) -> String {
    format!("cannot make {}: {error}", path.display())
}
