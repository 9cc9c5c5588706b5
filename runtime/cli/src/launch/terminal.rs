//! The output of ranks, on the terminal and in files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

/// The files of this attempt, and the streams that take no more. The lock is held while a line is written, so that no two lines are
/// mixed.
type Output = Mutex<Files>;

#[derive(Debug, Default)]
struct Files {
    logs: HashMap<String, File>,
    full: Vec<Stream>,
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
        files(&self.output).logs = logs;
        Ok(())
    }

    /// Writes a line of a rank, or of the program that starts them. After an error of the terminal, only the files continue.
    pub(super) fn line(&self, who: &str, stream: Stream, line: &[u8]) {
        let whole = [b"[", who.as_bytes(), b"] ", line, b"\n"].concat();
        let mut files = files(&self.output);
        if !files.full.contains(&stream)
            && let Err(error) = stream.write(&whole)
        {
            files.full.push(stream);
            self.miss(stream, &error);
        }
        let Some(file) = files.logs.get_mut(who) else { return };
        let kept = file.write_all(&[line, b"\n"].concat());
        if let Err(error) = kept {
            files.logs.remove(who);
            self.say(&format!("the log of [{who}] ends here: {error}"));
        }
    }

    /// Tells the user that a stream takes no more, unless its reader has ended on purpose, as `head` does.
    fn miss(&self, stream: Stream, error: &io::Error) {
        if stream == Stream::Stdout && error.kind() != io::ErrorKind::BrokenPipe {
            self.say(&format!("stdout ends here: {error}"));
        }
    }

    /// Prints a line of the launcher itself. Does not wait for the terminal.
    pub(super) fn say(&self, line: &str) {
        let _ = self.said.try_send(Said::Line(format!("hsdp: {line}\n")));
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
                let _files = files(output);
                let _ = io::stderr().lock().write_all(line.as_bytes());
            }
            Said::All(written) => {
                let _ = written.try_send(());
            }
        }
    }
}

impl Stream {
    fn write(self, line: &[u8]) -> io::Result<()> {
        match self {
            Self::Stdout => io::stdout().lock().write_all(line),
            Self::Stderr => io::stderr().lock().write_all(line),
        }
    }
}

fn files(output: &Output) -> MutexGuard<'_, Files> {
    output.lock().unwrap_or_else(PoisonError::into_inner)
}

fn cannot_make(path: &Path, error: &io::Error) -> String {
    format!("cannot make {}: {error}", path.display())
}
