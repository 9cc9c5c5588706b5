//! The files that `--out` keeps.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::failure::Failure;
use super::progress::StepRecord;
use super::trace::{Switch, Trace};
use super::train::{Job, Run};
use super::{plot, report, saving};

/// A folder for the files of one run.
pub(crate) struct Output {
    folder: PathBuf,
    trace: Trace,
}

impl Output {
    /// Makes the folder, and begins to trace.
    pub(crate) fn create(folder: &Path) -> Result<Self, Failure> {
        let refuse =
            |error| Failure::Input(format!("cannot write to {}: {error}", folder.display()));
        fs::create_dir_all(folder).map_err(refuse)?;
        let file = folder.join("trace.json");
        File::create(&file).map_err(refuse)?;
        Ok(Self { folder: folder.to_owned(), trace: Trace::start(&file)? })
    }

    /// The switch that ends the trace.
    pub(crate) fn trace_switch(&self) -> Switch {
        self.trace.switch()
    }

    /// The file of losses and gradient norms.
    pub(crate) fn metrics(&self) -> PathBuf {
        self.folder.join("metrics.jsonl")
    }

    /// Writes the summary and the plot of the loss, at the end of the run.
    pub(crate) fn finish(self, job: &Job<'_>, run: &Run) -> Result<(), Failure> {
        let summary =
            serde_json::to_string_pretty(&report::summary(job, run)).map_err(Failure::training)?;
        fs::write(self.folder.join("summary.json"), summary + "\n").map_err(Failure::training)?;
        plot::loss(&self.folder.join("loss.svg"), &run.records)
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// `metrics.jsonl`, one line for each step.
#[derive(Debug)]
pub(crate) struct Metrics(BufWriter<File>);

impl Metrics {
    /// Begins the file with its existing lines for the steps before `first`, the first step that this run makes.
    pub(crate) fn from_step(path: &Path, first: usize) -> Result<Self, Failure> {
        let kept = saving::lines_before(path, first);
        // If the run is killed here, the file has either all its old lines or the kept ones.
        let new = path.with_extension("jsonl.new");
        let rewrite = || {
            let mut file = File::create(&new)?;
            kept.iter().try_for_each(|line| writeln!(file, "{line}"))?;
            fs::rename(&new, path)?;
            Ok(Self(BufWriter::new(file)))
        };
        rewrite().map_err(Failure::training::<io::Error>)
    }

    pub(crate) fn add(&mut self, record: &StepRecord) -> Result<(), Failure> {
        serde_json::to_writer(&mut self.0, record).map_err(Failure::training)?;
        writeln!(self.0).map_err(Failure::training)?;
        // If the run is killed, the file has the lines of all steps that it made.
        self.0.flush().map_err(Failure::training)
    }
}
