//! The folder of a run, and the files that it keeps there.

mod lock;
mod metrics;
pub(crate) mod plot;
mod switch;
mod trace;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp::World;
use hsdp::checkpoint::format::{Disk, Store};
use serde_json::Value;

use crate::failure::Failure;
use crate::file::{self, replace_with};
use crate::options::RunOptions;
use crate::warnings::Warnings;

pub use self::lock::{FolderLock, LockError};
pub(crate) use self::metrics::Metrics;
pub use self::switch::Switch;
pub(crate) use self::trace::{Recorder, TRACED_STEPS, Trace};

/// The files of a run.
const METRICS: &str = "metrics.jsonl";
const METRICS_NEW: &str = "metrics.jsonl.new";
const NORMS: &str = "norms.svg";
const PLOT: &str = "loss.svg";
const SUMMARY: &str = "summary.json";
const TRACE: &str = "trace.json";
const WARNINGS: &str = "warnings.jsonl";

/// Folders of checkpoints: the last ones, and the best ones.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
pub(crate) const BEST: &str = "best";

/// Beginning and end of the name of the warnings of another process.
const OF_RANK: &str = "warnings-rank-";
const OF_RANK_END: &str = ".jsonl";

/// A folder for the files of one run, which this process has locked.
pub(crate) struct Output {
    files: Files,
    _trace: Trace,
    /// Dropped last: another run may then write to the folder.
    _lock: FolderLock,
}

/// The files of a run.
#[derive(Debug)]
pub(crate) struct Files {
    folder: PathBuf,
    /// Ends the trace.
    trace: Switch,
}

impl Output {
    /// Makes the folder, locks it, and begins to trace. Files of an earlier run stay until this one
    /// makes its first step. A folder with checkpoints is refused, unless the run goes on from them.
    pub(crate) fn create(
        folder: &Path,
        options: &RunOptions,
        recorder: &Recorder,
    ) -> Result<Self, Failure> {
        let refuse =
            |error| Failure::Input(format!("cannot write to {}: {error}", folder.display()));
        fs::create_dir_all(folder).map_err(refuse)?;
        let lock = FolderLock::take(folder)?;
        let checkpoints = Store::new(&folder.join(CHECKPOINTS), Arc::new(Disk)).steps();
        let newest = checkpoints.unwrap_or_default().into_iter().max();
        if let Some(newest) = newest.filter(|_| !options.resume) {
            return Err(Failure::Input(format!(
                "{} has checkpoints of an earlier run, the newest of step {newest}: go on from it \
                 with --resume, or choose another folder with --out",
                folder.display()
            )));
        }
        let mut files = [METRICS, METRICS_NEW, NORMS, PLOT, SUMMARY, TRACE, WARNINGS].into_iter();
        // A file that could not be written at the end of the run is found before it.
        files
            .try_for_each(|name| file::Output::check(&folder.join(name), &[]).map(drop))
            .map_err(|error| Failure::Input(format!("cannot write {error}")))?;
        let trace = recorder.start(&folder.join(TRACE))?;
        let files = Files { folder: folder.to_owned(), trace: trace.switch() };
        Ok(Self { files, _trace: trace, _lock: lock })
    }

    pub(crate) fn files(&self) -> &Files {
        &self.files
    }
}

impl Files {
    /// Begins the files of a run whose first step is `first`: gives the trace its name, in the place
    /// of an earlier one, and cuts the metrics back to the steps before.
    pub(crate) fn begin(&self, first: u64) -> Result<Metrics, Failure> {
        trace::keep(&self.folder.join(TRACE))?;
        Metrics::from_step(&self.folder.join(METRICS), first)
    }

    /// Ends the trace.
    pub(crate) fn end_trace(&self) {
        self.trace.turn_off();
    }

    /// Returns the path of the plot of the updates of each parameter.
    pub(crate) fn norms(&self) -> PathBuf {
        self.folder.join(NORMS)
    }

    /// Returns the path of the plot of the loss.
    pub(crate) fn plot(&self) -> PathBuf {
        self.folder.join(PLOT)
    }

    /// Writes `summary.json`.
    pub(crate) fn write_summary(&self, summary: &Value) -> Result<(), Failure> {
        let summary = serde_json::to_string_pretty(summary).map_err(Failure::work)?;
        replace_with(&self.folder.join(SUMMARY), |sink| writeln!(sink, "{summary}"))
            .map_err(|error| Failure::work(format!("cannot write {error}")).in_training())
    }
}

/// Keeps the warnings of this rank's process in a file, when its first step is about to be made and
/// rank 0 holds the lock. The warnings of an earlier run are removed, unless this run goes on with it.
pub(crate) fn keep_warnings(
    world: &World,
    options: &RunOptions,
    warnings: &Warnings,
) -> Result<(), Failure> {
    let rank = world.rank().index();
    let processes = if world.shares_memory() { 1 } else { world.size() };
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

/// Returns the warnings of ranks that an earlier run with more processes had.
fn of_missing_ranks(folder: &Path, processes: usize) -> Result<Vec<PathBuf>, Failure> {
    let rank_of = |name: &str| {
        let rank = name.strip_prefix(OF_RANK)?.strip_suffix(OF_RANK_END)?;
        rank.parse().ok().filter(|rank: &usize| *rank >= processes)
    };
    let cannot_list =
        |error| Failure::work(format!("cannot list the files of {}: {error}", folder.display()));
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

pub(crate) fn cannot_write(file: &Path, error: &io::Error) -> Failure {
    Failure::work(format!("cannot write {}: {error}", file.display()))
}
