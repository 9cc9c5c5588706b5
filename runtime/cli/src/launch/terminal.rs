//! The output of ranks, on the terminal and in files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::frame::Stream;

/// The terminal and the log files. Lines are written one at a time.
#[derive(Debug)]
pub(super) struct Terminal {
    folder: Option<PathBuf>,
    /// The files of this attempt. The lock is held while a line is written, so that no two lines are mixed.
    files: Mutex<HashMap<String, File>>,
}

impl Terminal {
    /// Log files go into this folder, if there is one.
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, files: Mutex::default() }
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
        let mut files = HashMap::new();
        let names = (0..ranks).map(|rank| (rank.to_string(), format!("rank-{rank}.log")));
        let starter = starter.map(|name| (name.to_owned(), format!("{name}.log")));
        for (who, name) in names.chain(starter) {
            let path = folder.join(name);
            let file = File::create(&path).map_err(|error| cannot_make(&path, &error))?;
            files.insert(who, file);
        }
        *self.files() = files;
        Ok(())
    }

    /// Writes a line of a rank, or of the program that starts them. An error of the terminal is ignored; the files continue.
    pub(super) fn line(&self, who: &str, stream: Stream, line: &[u8]) {
        let whole = [b"[", who.as_bytes(), b"] ", line, b"\n"].concat();
        let mut files = self.files();
        let _ = match stream {
            Stream::Stdout => io::stdout().lock().write_all(&whole),
            Stream::Stderr => io::stderr().lock().write_all(&whole),
        };
        let Some(file) = files.get_mut(who) else { return };
        let kept = file.write_all(&[line, b"\n"].concat());
        if let Err(error) = kept {
            files.remove(who);
            drop(files);
            self.say(&format!("the log of [{who}] ends here: {error}"));
        }
    }

    /// Prints a line of the launcher itself.
    pub(super) fn say(&self, line: &str) {
        let _files = self.files();
        let _ = writeln!(io::stderr().lock(), "hsdp: {line}");
    }

    fn files(&self) -> MutexGuard<'_, HashMap<String, File>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cannot_make(path: &Path, error: &io::Error) -> String {
    format!("cannot make {}: {error}", path.display())
}
