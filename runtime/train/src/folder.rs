//! The folder of a run, and the files that it keeps there.

mod metrics;
pub(crate) mod plot;
mod trace;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;
use std::{fs, io};

use hsdp::World;
use hsdp::checkpoint::format::{Disk, Store};
use serde::Serialize;
use serde_json::Value;

pub(crate) use self::metrics::Metrics;
pub use self::trace::Switch;
pub(crate) use self::trace::{TRACED_STEPS, Trace, TraceRecorder};

use crate::failure::Failure;
use crate::file::{self, replace_with};
use crate::lock::FolderLock;
use crate::options::{FLIGHT, RunOptions};
use crate::warnings::Warnings;

/// Names of a run's files.
const METRICS: &str = "metrics.jsonl";
const METRICS_NEW: &str = "metrics.jsonl.new";
const NORMS: &str = "norms.svg";
const PLOT: &str = "loss.svg";
const SUMMARY: &str = "summary.json";
const TRACE: &str = "trace.json";
const WARNINGS: &str = "warnings.jsonl";

/// Names of the folders of checkpoints: the latest ones and the best ones.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
pub(crate) const BEST: &str = "best";

/// Prefix and suffix of the file with another process's warnings.
const OF_RANK: &str = "warnings-rank-";
const OF_RANK_END: &str = ".jsonl";

/// A folder for the files of one run, which this process has locked.
pub(crate) struct RunFolder {
    files: RunFiles,
    _trace: Trace,
    /// Dropped last, because another run may write to the folder after that.
    _lock: FolderLock,
}

/// The files of a run.
#[derive(Debug)]
pub(crate) struct RunFiles {
    folder: PathBuf,
    /// Switch that ends the trace.
    trace: Switch,
    /// Flight records of an earlier run, with the times of their last changes.
    earlier: Vec<(PathBuf, SystemTime)>,
}

impl RunFolder {
    /// Creates the folder, locks it, and starts the trace. Files of an earlier run stay until this
    /// run makes its first step. Refuses a folder with checkpoints, unless the run is resumed.
    pub(crate) fn create(
        folder: &Path,
        options: &RunOptions,
        recorder: &TraceRecorder,
    ) -> Result<Self, Failure> {
        let refuse =
            |why: String| Failure::Input(format!("cannot write to {}: {why}", folder.display()));
        if folder.exists() && !folder.is_dir() {
            return Err(refuse("it exists, and is no folder".to_owned()));
        }
        fs::create_dir_all(folder).map_err(|error| refuse(error.to_string()))?;
        let lock = FolderLock::take(folder)?;
        if !options.resume {
            refuse_checkpoints(folder)?;
        }
        let mut files = [METRICS, METRICS_NEW, NORMS, PLOT, SUMMARY, TRACE, WARNINGS].into_iter();
        // Detects before the run any file that could not be written at its end.
        files
            .try_for_each(|name| file::Output::check(&folder.join(name), &[]).map(drop))
            .map_err(|error| Failure::Input(format!("cannot write {error}")))?;
        let trace = recorder.start(&folder.join(TRACE))?;
        let earlier = flight_records(&folder.join(FLIGHT))?;
        let files = RunFiles { folder: folder.to_owned(), trace: trace.switch(), earlier };
        Ok(Self { files, _trace: trace, _lock: lock })
    }

    pub(crate) fn files(&self) -> &RunFiles {
        &self.files
    }
}

impl RunFiles {
    /// Starts the files of a run whose first step is `first`. Renames the trace to its final name,
    /// and cuts the metrics back to the steps before `first`. If `first` is 0, removes the other
    /// files of an earlier run, which would be mistaken for files of this one until it ends.
    pub(crate) fn begin(&self, first: u64) -> Result<Metrics, Failure> {
        if first == 0 {
            [SUMMARY, PLOT, NORMS].iter().try_for_each(|name| remove(&self.folder.join(name)))?;
            self.remove_flight()?;
        }
        trace::keep(&self.folder.join(TRACE))?;
        Metrics::from_step(&self.folder.join(METRICS), first)
    }

    /// Removes the flight records of an earlier run, except those that a rank of this run has
    /// overwritten.
    fn remove_flight(&self) -> Result<(), Failure> {
        for (file, changed) in &self.earlier {
            if file.metadata().and_then(|it| it.modified()).is_ok_and(|it| it == *changed) {
                remove(file)?;
            }
        }
        // The folder stays if it contains anything else.
        let _ = fs::remove_dir(self.folder.join(FLIGHT));
        Ok(())
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

    pub(crate) fn write_summary(&self, summary: &Value) -> Result<(), Failure> {
        let summary = serde_json::to_string_pretty(summary).map_err(Failure::work)?;
        replace_with(&self.folder.join(SUMMARY), |sink| writeln!(sink, "{summary}"))
            .map_err(|error| Failure::work(format!("cannot write {error}")).in_training())
    }
}

/// Refuses a folder with checkpoints of an earlier run.
fn refuse_checkpoints(folder: &Path) -> Result<(), Failure> {
    let newest = |name| {
        let steps = Store::new(&folder.join(name), Arc::new(Disk)).steps();
        steps.map(|steps| steps.last().copied()).map_err(Failure::input)
    };
    let (kind, step, way_on) = match (newest(CHECKPOINTS)?, newest(BEST)?) {
        (Some(step), _) => ("checkpoints", step, "go on from it with --resume".to_owned()),
        (None, Some(step)) => {
            let best = folder.join(BEST);
            let ways = format!(
                "remove {}, begin anew with --resume and --save-best, which removes it",
                best.display()
            );
            ("best checkpoints", step, ways)
        }
        (None, None) => return Ok(()),
    };
    Err(Failure::Input(format!(
        "{} has {kind} of an earlier run, the newest of step {step}: {way_on}, or choose another \
         folder with --out",
        folder.display()
    )))
}

/// Returns the flight records in a folder with the times of their last changes. Empty if there is
/// no folder.
fn flight_records(folder: &Path) -> Result<Vec<(PathBuf, SystemTime)>, Failure> {
    let cannot_list =
        |error| Failure::Input(format!("cannot list the files of {}: {error}", folder.display()));
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(cannot_list)?,
    };
    let mut records = Vec::new();
    for entry in entries {
        let entry = entry.map_err(cannot_list)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("rank-") && name.ends_with(".json") {
            let changed = entry.metadata().and_then(|it| it.modified()).map_err(cannot_list)?;
            records.push((entry.path(), changed));
        }
    }
    Ok(records)
}

/// Writes the warnings of this rank's process into a file from now on. It is called before the
/// first step, when rank 0 holds the lock. Removes the warnings of an earlier run, unless this run
/// resumes it.
pub(crate) fn keep_warnings(
    world: &World,
    options: &RunOptions,
    warnings: &Warnings,
) -> Result<(), Failure> {
    let rank = world.rank().index();
    let processes = if world.shares_memory() { 1 } else { world.size() };
    // A process writes its warnings into the file of its first rank.
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

/// Removes a file if it exists.
fn remove(file: &Path) -> Result<(), Failure> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(cannot_write(file, &error)),
        _ => Ok(()),
    }
}

pub(crate) fn cannot_write(file: &Path, error: &io::Error) -> Failure {
    Failure::work(format!("cannot write {}: {error}", file.display()))
}

/// A line of `metrics.jsonl`, without norms of each parameter and an evaluation.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct StepRecord {
    /// Number of the step, from 0.
    pub(crate) step: u64,
    /// Mean loss of all ranks.
    pub(crate) loss: f64,
    /// 2-norm of the gradients, before clipping; null in the file where a gradient overflowed.
    pub(crate) grad_norm: f64,
    /// Number of tokens on all ranks.
    pub(crate) tokens: u64,
    /// Time of the microbatches and the update.
    pub(crate) seconds: f64,
    /// False if all ranks skipped the update because a gradient overflowed.
    #[serde(skip)]
    pub(crate) applied: bool,
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn folder_with(files: &[&str]) -> TempDir {
        let folder = TempDir::new().expect("a folder");
        for file in files {
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().expect("a folder")).expect("made");
            fs::write(file, "earlier").expect("written");
        }
        folder
    }

    /// Returns the names of the files that remain from an earlier run.
    fn left_of(files: &[&str], first: u64) -> Vec<String> {
        let place = folder_with(files);
        let folder = place.path().to_owned();
        fs::write(folder.join("trace.json.new"), "").expect("written");
        let earlier = flight_records(&folder.join(FLIGHT)).expect("it is listed");
        // The record of a rank that failed before rank 0 started.
        let failed = folder.join("flight/rank-1.json");
        if failed.exists() {
            let file = fs::File::options().write(true).open(failed).expect("a file");
            file.set_modified(SystemTime::UNIX_EPOCH).expect("it changes");
        }
        let begun = RunFiles { folder: folder.clone(), trace: Switch::default(), earlier };
        begun.begin(first).expect("it begins");
        files.iter().filter(|it| folder.join(it).exists()).map(|&it| it.to_owned()).collect()
    }

    #[test]
    fn a_run_from_step_0_keeps_no_file_of_an_earlier_one() {
        let files = ["summary.json", "loss.svg", "norms.svg", "flight/rank-0.json", "notes.txt"];
        assert_eq!(left_of(&files, 0), ["notes.txt"]);
        assert_eq!(left_of(&files, 7), files);
        let of_this_run = ["flight/rank-1.json", "flight/notes.txt"];
        assert_eq!(left_of(&of_this_run, 0), of_this_run);
    }

    #[test]
    fn checkpoints_that_are_the_best_or_cannot_be_listed_are_refused() {
        let refusal = |files: &[&str]| {
            let folder = folder_with(files);
            let refused = refuse_checkpoints(folder.path()).expect_err("it is refused");
            assert!(matches!(refused, Failure::Input(_)), "{refused:?}");
            refused.to_string()
        };
        let best = refusal(&["best/step-00000006/manifest.json"]);
        assert!(
            best.contains("has best checkpoints of an earlier run, the newest of step 6"),
            "{best}"
        );
        let ways = "/best, begin anew with --resume and --save-best, which removes it, or choose";
        assert!(best.contains(ways), "{best}");
        let newest = refusal(&["best/step-00000006/x", "checkpoints/step-00000007/x"]);
        assert!(newest.contains("the newest of step 7: go on from it with --resume"), "{newest}");
        let unread = refusal(&["checkpoints"]);
        assert!(unread.contains("/checkpoints"), "{unread}");
        refuse_checkpoints(folder_with(&["loss.svg"]).path()).expect("no checkpoints");
    }
}
