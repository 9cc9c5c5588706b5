//! The files that `--out` keeps.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use hsdp::World;
use hsdp_program::file::{FileError, replace_with};
use hsdp_program::{FolderLock, Warnings, file};
use serde::Serialize;
use serde_json::Value;

use super::failure::Failure;
use super::options::RunOptions;
use super::progress::StepRecord;
use super::trace::{Recorder, Trace};
use super::{plot, saving};

/// The files of a run.
const METRICS: &str = "metrics.jsonl";
const METRICS_NEW: &str = "metrics.jsonl.new";
const NORMS: &str = "norms.svg";
const PLOT: &str = "loss.svg";
const SUMMARY: &str = "summary.json";
const TRACE: &str = "trace.json";
const WARNINGS: &str = "warnings.jsonl";

/// The beginning and the end of the name of the warnings of another process.
const OF_RANK: &str = "warnings-rank-";
const OF_RANK_END: &str = ".jsonl";

/// A folder for the files of one run.
pub(crate) struct Output {
    folder: PathBuf,
    trace: Trace,
    /// Dropped last: another run may then write to the folder.
    _lock: FolderLock,
}

impl Output {
    /// Makes the folder, locks it, and begins to trace. Files of an earlier run stay until this one makes its first step.
    pub(crate) fn create(folder: &Path, recorder: &Recorder) -> Result<Self, Failure> {
        let refuse =
            |error| Failure::Input(format!("cannot write to {}: {error}", folder.display()));
        fs::create_dir_all(folder).map_err(refuse)?;
        let lock = FolderLock::take(folder).map_err(Failure::input)?;
        check_files(folder)?;
        let trace = recorder.start(&folder.join(TRACE))?;
        Ok(Self { folder: folder.to_owned(), trace, _lock: lock })
    }

    /// The trace.
    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// The file of losses and gradient norms.
    pub(crate) fn metrics(&self) -> PathBuf {
        self.folder.join(METRICS)
    }

    /// The plot of the updates of each parameter.
    pub(crate) fn norms(&self) -> PathBuf {
        self.folder.join(NORMS)
    }

    /// Writes the summary and the plot of the loss, at the end of the run. `item` is that of the loss: a character, say.
    pub(crate) fn finish(
        &self,
        summary: &Value,
        (records, item): (&[StepRecord], &str),
    ) -> Result<(), Failure> {
        let summary = serde_json::to_string_pretty(summary).map_err(Failure::training)?;
        let written = replace_with(&self.folder.join(SUMMARY), |sink| writeln!(sink, "{summary}"));
        written.map_err(cannot_write_whole)?;
        plot::loss(&self.folder.join(PLOT), records, item)
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// Refuses a folder in which a file could not be written at the end of the run.
fn check_files(folder: &Path) -> Result<(), Failure> {
    let mut files = [METRICS, METRICS_NEW, NORMS, PLOT, SUMMARY, TRACE, WARNINGS].into_iter();
    files
        .try_for_each(|name| file::Output::check(&folder.join(name), &[]).map(drop))
        .map_err(|error| Failure::Input(format!("cannot write {error}")))
}

/// Keeps the warnings of this rank's process in a file, when its first step is about to be made and rank 0 holds the lock. The
/// warnings of an earlier run are removed, unless this run goes on with it.
pub(crate) fn keep_warnings(
    world: &World,
    options: &RunOptions,
    warnings: &Warnings,
) -> Result<(), Failure> {
    let (rank, processes) =
        (world.rank().index(), if world.shares_memory() { 1 } else { world.size() });
    // A process keeps its warnings in the file of its first rank.
    let Some(folder) = options.out.as_ref().filter(|_| rank < processes) else { return Ok(()) };
    let file = folder.join(match rank {
        0 => WARNINGS.to_owned(),
        rank => format!("{OF_RANK}{rank}{OF_RANK_END}"),
    });
    if !options.resume {
        remove(&file)?;
    }
    if rank == 0 && !options.resume {
        of_missing_ranks(folder, processes)?.iter().try_for_each(|file| remove(file))?;
    }
    warnings.keep_in(&file);
    Ok(())
}

/// The warnings of ranks that an earlier run with more processes had.
fn of_missing_ranks(folder: &Path, processes: usize) -> Result<Vec<PathBuf>, Failure> {
    let rank_of = |name: &str| {
        let rank = name.strip_prefix(OF_RANK)?.strip_suffix(OF_RANK_END)?;
        rank.parse().ok().filter(|rank: &usize| *rank >= processes)
    };
    let cannot_list = |error| {
        Failure::Training(format!("cannot list the files of {}: {error}", folder.display()))
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot_list)? {
        let entry = entry.map_err(cannot_list)?;
        if entry.file_name().to_str().and_then(rank_of).is_some() {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// Removes a file, if it is there.
fn remove(file: &Path) -> Result<(), Failure> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(cannot_write(file, &error)),
        _ => Ok(()),
    }
}

/// `metrics.jsonl`, one line for each step.
#[derive(Debug)]
pub(crate) struct Metrics {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Metrics {
    /// Begins the file with its existing lines for the steps before `first`, the first step that this run makes.
    pub(crate) fn from_step(path: &Path, first: usize) -> Result<Self, Failure> {
        let kept = saving::lines_before(path, first)?;
        let failed = |error| cannot_write(path, &error);
        // If the run is killed here, the file has either all its old lines or the kept ones.
        let new = path.with_file_name(METRICS_NEW);
        let mut file = file::create_log(&new).map(BufWriter::new).map_err(cannot_write_whole)?;
        let begin = || {
            for line in kept {
                file.write_all(&line?).and_then(|()| writeln!(file)).map_err(failed)?;
            }
            file.flush().and_then(|()| fs::rename(&new, path)).map_err(failed)
        };
        begin().inspect_err(|_| {
            // Removes a file that could not be written whole.
            let _ = fs::remove_file(&new);
        })?;
        Ok(Self { path: path.to_owned(), file })
    }

    pub(crate) fn add(&mut self, line: &impl Serialize) -> Result<(), Failure> {
        // If the run is killed, the file has the lines of all steps that it made.
        let added = serde_json::to_writer(&mut self.file, line)
            .map_err(io::Error::from)
            .and_then(|()| writeln!(self.file))
            .and_then(|()| self.file.flush());
        added.map_err(|error| cannot_write(&self.path, &error))
    }
}

/// Returns the failure of a file that is as it was before.
pub(crate) fn cannot_write_whole(error: FileError) -> Failure {
    Failure::Training(format!("cannot write {error}"))
}

fn cannot_write(file: &Path, error: &io::Error) -> Failure {
    Failure::Training(format!("cannot write {}: {error}", file.display()))
}
