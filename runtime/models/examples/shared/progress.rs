//! The progress bar and the records of steps while training runs.

use std::path::PathBuf;

use hsdp_program::Warnings;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::failure::Failure;
use super::norms::{Ratios, StepNorms};
use super::output::{Metrics, Output};
use super::switch::Switch;
use super::trace::{self, TRACED_STEPS};

/// A line of `metrics.jsonl`, but for norms of each parameter.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct StepRecord {
    pub(crate) step: usize,
    pub(crate) loss: f64,
    /// Before clipping; null in the file where a gradient overflowed.
    pub(crate) grad_norm: f64,
    pub(crate) tokens: u64,
    pub(crate) seconds: f64,
    /// False where all ranks skipped the update, because a gradient overflowed.
    #[serde(skip)]
    pub(crate) applied: bool,
}

/// The same, with the norms of each parameter where they are recorded.
#[derive(Debug, Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    record: &'a StepRecord,
    #[serde(skip_serializing_if = "Option::is_none")]
    norms: Option<&'a StepNorms>,
}

/// The progress bar, and the files that grow with each step.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    metrics: Option<(PathBuf, Option<Metrics>)>,
    trace: Option<(PathBuf, Switch)>,
    records: Vec<StepRecord>,
    /// The ratios of updates to parameters, and the file into which they are drawn.
    ratios: (Ratios, Option<PathBuf>),
}

impl Progress {
    /// A bar of `steps` steps, which is silent where stderr is no terminal. Warnings are shown beside it.
    pub(crate) fn new(
        steps: usize,
        output: Option<&Output>,
        warnings: &Warnings,
    ) -> Result<Self, Failure> {
        let template = "{bar:32} {pos}/{len} {elapsed}  {msg}";
        let style = ProgressStyle::with_template(template).map_err(Failure::training)?;
        let bar = ProgressBar::new(steps as u64).with_style(style);
        warnings.show_beside(&bar);
        let metrics = output.map(|output| (output.metrics(), None));
        let trace = output.map(Output::trace);
        let trace = trace.map(|trace| (trace.file().to_owned(), trace.switch()));
        let ratios = (Ratios::default(), output.map(Output::norms));
        Ok(Self { bar, metrics, trace, records: Vec::new(), ratios })
    }

    /// Starts at step `first`, which is about to be made. Files of an earlier run are replaced here, not before.
    pub(crate) fn start(&mut self, first: usize) -> Result<(), Failure> {
        self.bar.set_position(first as u64);
        if let Some((file, _)) = &self.trace {
            trace::keep(file)?;
        }
        if let Some((path, metrics)) = &mut self.metrics {
            *metrics = Some(Metrics::from_step(path, first)?);
        }
        Ok(())
    }

    /// Shows and records a step that is done, with its norms.
    pub(crate) fn add(
        &mut self,
        record: StepRecord,
        norms: Option<StepNorms>,
    ) -> Result<(), Failure> {
        let StepRecord { loss, grad_norm, seconds, .. } = record;
        let rate = record.tokens as f64 / seconds;
        self.bar
            .set_message(format!("loss {loss:.3}  gradient {grad_norm:.2}  {rate:.0} tokens/s"));
        self.bar.inc(1);
        if let Some((_, Some(metrics))) = &mut self.metrics {
            metrics.add(&Line { record: &record, norms: norms.as_ref() })?;
        }
        self.ratios.0.add(record.step, norms);
        self.records.push(record);
        if let Some((_, switch)) = self.trace.take_if(|_| self.records.len() == TRACED_STEPS) {
            switch.turn_off();
        }
        Ok(())
    }

    /// Ends the bar, draws the ratios of updates, and returns all records.
    pub(crate) fn finish(self) -> Result<Vec<StepRecord>, Failure> {
        self.bar.finish();
        let (ratios, file) = &self.ratios;
        file.as_ref().map_or(Ok(()), |file| ratios.draw(file))?;
        Ok(self.records)
    }
}
