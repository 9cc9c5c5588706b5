//! The files that `--out` keeps.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use hsdp::World;
use hsdp_program::{FolderLock, Warnings, file};

use super::failure::Failure;
use super::options::Options;
use super::progress::StepRecord;
use super::trace::{Recorder, Trace};
use super::train::{Job, Run};
use super::{plot, report, saving};

/// The files of a run.
const METRICS: &str = "metrics.jsonl";
const PLOT: &str = "loss.svg";
const SUMMARY: &str = "summary.json";
const TRACE: &str = "trace.json";
const WARNINGS: &str = "warnings.jsonl";

/// A folder for the files of one run.
pub(crate) struct Output {
    folder: PathBuf,
    trace: Trace,
    /// Dropped last: another run may then write to the folder.
    _lock: FolderLock,
}

impl Output {
    /// Makes the folder, locks it, and begins to keep warnings and to trace.
    pub(crate) fn create(
        (folder, options): (&Path, &Options),
        (recorder, warnings): (&Recorder, &Warnings),
    ) -> Result<Self, Failure> {
        let refuse =
            |error| Failure::Input(format!("cannot write to {}: {error}", folder.display()));
        fs::create_dir_all(folder).map_err(refuse)?;
        let lock = FolderLock::take(folder).map_err(Failure::input)?;
        check_files(folder)?;
        let trace = recorder.start(&folder.join(TRACE))?;
        keep_warnings(&folder.join(WARNINGS), options, warnings)?;
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

    /// Writes the summary and the plot of the loss, at the end of the run.
    pub(crate) fn finish(&self, job: &Job<'_>, run: &Run) -> Result<(), Failure> {
        let summary =
            serde_json::to_string_pretty(&report::summary(job, run)).map_err(Failure::training)?;
        let file = self.folder.join(SUMMARY);
        fs::write(&file, summary + "\n").map_err(|error| cannot_write(&file, &error))?;
        plot::loss(&self.folder.join(PLOT), &run.records)
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// Refuses a folder in which a file could not be written at the end of the run.
fn check_files(folder: &Path) -> Result<(), Failure> {
    let mut files = [METRICS, PLOT, SUMMARY, TRACE, WARNINGS].into_iter();
    files
        .try_for_each(|name| file::check_writable(&folder.join(name)))
        .map_err(|error| Failure::Input(format!("cannot write {error}")))
}

/// Keeps the warnings of a rank that is another process than rank 0 in a file of its own, once rank 0 holds the lock.
pub(crate) fn keep_warnings_of(world: &World, job: &Job<'_>) -> Result<(), Failure> {
    let rank = world.rank().index();
    let folder = job.options.out.as_ref().filter(|_| rank > 0 && !world.shares_memory());
    let Some(folder) = folder else { return Ok(()) };
    let file = folder.join(format!("warnings-rank-{rank}.jsonl"));
    keep_warnings(&file, job.options, job.warnings)
}

/// Keeps warnings in a file, which begins anew unless the run goes on with an earlier one.
fn keep_warnings(file: &Path, options: &Options, warnings: &Warnings) -> Result<(), Failure> {
    if !options.resume && file.exists() {
        fs::remove_file(file).map_err(|error| cannot_write(file, &error))?;
    }
    warnings.keep_in(file);
    Ok(())
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
        // If the run is killed here, the file has either all its old lines or the kept ones.
        let new = path.with_extension("jsonl.new");
        let rewrite = || {
            let mut file = File::create(&new)?;
            kept.iter().try_for_each(|line| writeln!(file, "{line}"))?;
            fs::rename(&new, path)?;
            Ok(BufWriter::new(file))
        };
        let file = rewrite().map_err(|error| cannot_write(path, &error))?;
        Ok(Self { path: path.to_owned(), file })
    }

    pub(crate) fn add(&mut self, record: &StepRecord) -> Result<(), Failure> {
        // If the run is killed, the file has the lines of all steps that it made.
        let added = serde_json::to_writer(&mut self.file, record)
            .map_err(io::Error::from)
            .and_then(|()| writeln!(self.file))
            .and_then(|()| self.file.flush());
        added.map_err(|error| cannot_write(&self.path, &error))
    }
}

fn cannot_write(file: &Path, error: &io::Error) -> Failure {
    Failure::Training(format!("cannot write {}: {error}", file.display()))
}
