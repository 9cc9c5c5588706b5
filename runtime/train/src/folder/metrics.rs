//! `metrics.jsonl`, with one line for each step.

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{METRICS_NEW, cannot_write};
use crate::failure::Failure;
use crate::file::{self, FileError};

/// Maximum number of bytes in a line, enough for the norms of 80,000 parameters.
const MAX_LINE: u64 = 16 << 20;

/// The file.
#[derive(Debug)]
pub(crate) struct Metrics {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Metrics {
    /// Creates the file with the lines of an earlier run for steps before `first`, the first step
    /// of this run.
    pub(crate) fn from_step(path: &Path, first: u64) -> Result<Self, Failure> {
        let kept = lines_before(path, first)?;
        let failed = |error| cannot_write(path, &error);
        // If the run is killed here, the file has either all its old lines or the kept ones.
        let new = path.with_file_name(METRICS_NEW);
        let file = file::create_log(&new);
        let file = file.map_err(|error| Failure::work(format!("cannot write {error}")))?;
        let mut file = BufWriter::new(file);
        let begin = || {
            for line in kept {
                file.write_all(&line?).and_then(|()| writeln!(file)).map_err(failed)?;
            }
            file.flush().and_then(|()| fs::rename(&new, path)).map_err(failed)
        };
        begin().inspect_err(|_| {
            // Removes an incomplete file.
            let _ = fs::remove_file(&new);
        })?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Appends a line. If the run is killed, the file has the lines of all completed steps.
    pub(crate) fn add(&mut self, line: &impl Serialize) -> Result<(), Failure> {
        let added = serde_json::to_writer(&mut self.file, line)
            .map_err(io::Error::from)
            .and_then(|()| writeln!(self.file))
            .and_then(|()| self.file.flush());
        added.map_err(|error| cannot_write(&self.path, &error))
    }
}

/// The step of a line.
#[derive(Deserialize)]
struct OfStep {
    step: u64,
}

/// Returns the complete lines of steps before `step`, without their line ends. Returns none if the
/// file is absent, and skips other lines. The lines are read one at a time, because with norms in
/// each step all of them may exceed the memory.
fn lines_before(
    path: &Path,
    step: u64,
) -> Result<impl Iterator<Item = Result<Vec<u8>, Failure>> + use<>, Failure> {
    let lines = match file::lines(path, MAX_LINE) {
        _ if step == 0 => None,
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
        lines => Some(lines?),
    };
    let is_before = move |line: &Vec<u8>| {
        serde_json::from_slice(line).is_ok_and(|line: OfStep| line.step < step)
    };
    let lines = lines.into_iter().flatten().map(|line| Ok(line?));
    Ok(lines.filter(move |line: &Result<_, Failure>| line.as_ref().map_or(true, is_before)))
}
