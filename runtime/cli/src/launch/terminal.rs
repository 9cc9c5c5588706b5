//! The output of ranks, on the terminal and in files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hsdp_program::stdout::{self, PrintError};

use super::frame::Stream;
use super::threads;

/// The terminal and the log files. Lines are written one at a time.
///
/// If the reader of stdout or stderr stands still, threads that show lines of ranks wait for it, and so the ranks wait. The launcher
/// itself does not: a thread writes its lines, so that it can always end the job.
#[derive(Debug)]
pub(super) struct Terminal {
    folder: Option<PathBuf>,
    output: Arc<Output>,
    said: SyncSender<Said>,
}

#[derive(Debug, Default)]
struct Output {
    /// The files of this attempt. The lock is held while a line is written, so that no two lines are mixed.
    logs: Mutex<HashMap<String, File>>,
    /// Whether stdout has refused a line. It gets no further ones.
    has_lost: AtomicBool,
}

/// A line of the launcher, or the question whether all lines before it are written.
#[derive(Debug)]
enum Said {
    Line(String),
    All(SyncSender<()>),
}

/// The lines of the launcher that wait for the terminal, at most. Further ones are dropped.
const WAITING: usize = 1024;

/// How long the terminal may take to take the last lines of the launcher.
const LAST_LINES: Duration = Duration::from_secs(1);

impl Terminal {
    /// Log files go into this folder, if there is one.
    ///
    /// # Errors
    /// The error of the system, which may have no thread for the lines of the launcher.
    pub(super) fn new(folder: Option<PathBuf>) -> io::Result<Self> {
        let output = Arc::<Output>::default();
        let (said, waiting) = mpsc::sync_channel(WAITING);
        let locked = Arc::clone(&output);
        threads::start(move || write_all(&waiting, &locked))?;
        Ok(Self { folder, output, said })
    }

    /// Makes the log files of an attempt: one for each rank, and one for the program that starts them. Files of an earlier job are
    /// overwritten.
    ///
    /// # Errors
    /// In words.
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
            let file = File::create(&path).map_err(|error| cannot_make(&path, &error))?;
            logs.insert(who, file);
        }
        *self.output.lock() = logs;
        Ok(())
    }

    /// Writes a line of a rank, or of the program that starts them. The first error of stdout is told, and the files continue.
    pub(super) fn line(&self, who: &str, stream: Stream, line: &[u8]) {
        let whole = [b"[", who.as_bytes(), b"] ", line, b"\n"].concat();
        let mut logs = self.output.lock();
        if let Err(error) = self.output.show(stream, &whole) {
            self.say(&format!("{error}: some output of the ranks is lost"));
        }
        let Some(file) = logs.get_mut(who) else { return };
        let kept = file.write_all(&[line, b"\n"].concat());
        if let Err(error) = kept {
            logs.remove(who);
            self.say(&format!("the log of [{who}] ends here: {error}"));
        }
    }

    /// Whether a line could not be written to stdout. Does not wait for the terminal.
    pub(super) fn has_lost(&self) -> bool {
        self.output.has_lost.load(Ordering::Relaxed)
    }

    /// Prints a line of the launcher itself. Does not wait for the terminal.
    pub(super) fn say(&self, line: &str) {
        let _ = self.said.try_send(Said::Line(line.to_owned()));
    }

    /// Waits until all lines of the launcher are written, for at most a second.
    pub(super) fn finish(&self) {
        let (all, written) = mpsc::sync_channel(1);
        if self.said.try_send(Said::All(all)).is_ok() {
            let _ = written.recv_timeout(LAST_LINES);
        }
    }
}

/// Writes the lines of the launcher until it ends.
fn write_all(waiting: &Receiver<Said>, output: &Output) {
    for said in waiting {
        match said {
            Said::Line(line) => {
                let _logs = output.lock();
                hsdp_program::tell("hsdp", line);
            }
            Said::All(written) => {
                let _ = written.try_send(());
            }
        }
    }
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, File>> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a line that is not mixed with others, while the caller holds the lock.
    fn show(&self, stream: Stream, line: &[u8]) -> Result<(), PrintError> {
        match stream {
            Stream::Stdout if self.has_lost.load(Ordering::Relaxed) => Ok(()),
            Stream::Stdout => {
                stdout::write(line).inspect_err(|_| self.has_lost.store(true, Ordering::Relaxed))
            }
            Stream::Stderr => {
                // An error of stderr cannot be reported anywhere.
                let _ = io::stderr().lock().write_all(line);
                Ok(())
            }
        }
    }
}

fn cannot_make(path: &Path, error: &io::Error) -> String {
    format!("cannot make {}: {error}", path.display())
}
