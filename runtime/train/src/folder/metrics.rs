//! `metrics.jsonl`, with one line for each step.

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write as _};
use std::ops::RangeInclusive;
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
    /// of this run. Warns if lines between the first kept one and `first` are missing, or all.
    pub(crate) fn from_step(path: &Path, first: u64) -> Result<Self, Failure> {
        let kept = lines_before(path, first)?;
        let failed = |error| cannot_write(path, &error);
        // If the run is killed here, the file has either all its old lines or the kept ones.
        let new = path.with_file_name(METRICS_NEW);
        let file = file::create_log(&new);
        let file = file.map_err(|error| Failure::work(format!("cannot write {error}")))?;
        let mut file = BufWriter::new(file);
        let mut missing = Missing::default();
        let begin = || {
            for kept in kept {
                let (step, line) = kept?;
                missing.add(step);
                file.write_all(&line).and_then(|()| writeln!(file)).map_err(failed)?;
            }
            file.flush().and_then(|()| fs::rename(&new, path)).map_err(failed)
        };
        begin().inspect_err(|_| {
            // Removes an incomplete file.
            let _ = fs::remove_file(&new);
        })?;
        if let Some(steps) = missing.until(first) {
            let path = path.display();
            hsdp_warnings::warn!(
                "{path} has no lines of steps that were made before this run: {steps}"
            );
        }
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

/// Maximum number of ranges of missing steps that are listed.
const LISTED: usize = 3;

/// Steps without a line.
#[derive(Debug, Default)]
struct Missing {
    /// Step that the next line should have. `None` before the first line.
    next: Option<u64>,
    ranges: Vec<RangeInclusive<u64>>,
}

impl Missing {
    /// Adds the step of the next line.
    fn add(&mut self, step: u64) {
        if let Some(next) = self.next.filter(|next| *next < step) {
            self.ranges.push(next..=step - 1);
        }
        self.next = Some(step + 1);
    }

    /// Describes the missing steps, numbered from 0, if all steps up to `first` were made. If there
    /// is no line at all, all of them are missing.
    fn until(mut self, first: u64) -> Option<String> {
        self.next.get_or_insert(0);
        self.add(first);
        let shown = self.ranges.iter().take(LISTED).map(|it| match it.start() == it.end() {
            true => it.start().to_string(),
            false => format!("{} to {}", it.start(), it.end()),
        });
        let shown = shown.collect::<Vec<_>>().join(", ");
        match self.ranges.len() {
            0 => None,
            count if count > LISTED => Some(format!("{shown} and {} gaps more", count - LISTED)),
            _ => Some(shown),
        }
    }
}

/// Returns the complete lines of steps before `step`, with their steps and without their line ends.
/// Returns none if the file is absent, and skips other lines. The lines are read one at a time, because with norms in
/// each step all of them may exceed the memory.
fn lines_before(
    path: &Path,
    step: u64,
) -> Result<impl Iterator<Item = Result<(u64, Vec<u8>), Failure>> + use<>, Failure> {
    let lines = match file::lines(path, MAX_LINE) {
        _ if step == 0 => None,
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
        lines => Some(lines?),
    };
    let of_step = move |line: Vec<u8>| {
        let OfStep { step: of } = serde_json::from_slice(&line).ok()?;
        (of < step).then_some((of, line))
    };
    let lines = lines.into_iter().flatten();
    Ok(lines.filter_map(move |line| match line {
        Ok(line) => of_step(line).map(Ok),
        Err(error) => Some(Err(error.into())),
    }))
}

#[cfg(test)]
mod tests {
    use super::Missing;

    #[test]
    fn missing_steps_are_listed() {
        let missing = |steps: &[u64], first| {
            let mut missing = Missing::default();
            steps.iter().for_each(|step| missing.add(*step));
            missing.until(first)
        };
        assert_eq!(missing(&[], 0), None);
        assert_eq!(missing(&[0, 1, 2], 3), None);
        assert_eq!(missing(&[5, 6], 7), None, "the run may have begun in another folder");
        assert_eq!(missing(&[], 3).as_deref(), Some("0 to 2"));
        assert_eq!(missing(&[], 1).as_deref(), Some("0"));
        assert_eq!(missing(&[0, 1, 3, 6], 9).as_deref(), Some("2, 4 to 5, 7 to 8"));
        let most = missing(&[0, 2, 4, 6, 8], 10);
        assert_eq!(most.as_deref(), Some("1, 3, 5 and 2 gaps more"));
    }
}
