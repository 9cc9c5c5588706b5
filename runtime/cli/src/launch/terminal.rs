//! What ranks write, on the terminal and in files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::frame::Stream;

/// Where lines go, one at a time.
#[derive(Debug)]
pub(super) struct Terminal {
    folder: Option<PathBuf>,
    /// Held while a line is written, so that no two are mixed; with it, the files of this attempt.
    files: Mutex<HashMap<String, File>>,
}

impl Terminal {
    /// Files go into this folder, if there is one.
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, files: Mutex::default() }
    }

    /// Makes the files of an attempt, of each rank and of what starts them. Those of an earlier job are overwritten.
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

    /// Writes a line of a rank, or of what starts them. Nobody is left to be told where a terminal is gone; files go on.
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

    /// Says something of the launcher's own.
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
