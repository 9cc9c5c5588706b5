//! The progress bar, and the records of steps.

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::norms::{Ratios, StepNorms};
use crate::failure::Failure;
use crate::folder::{Files, Metrics, TRACED_STEPS};
use crate::record::StepRecord;
use crate::setup::Setup;
use crate::warnings::Warnings;

/// A line of `metrics.jsonl`, with norms of each parameter and an evaluation if there are any.
#[derive(Debug, Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    record: &'a StepRecord,
    #[serde(skip_serializing_if = "Option::is_none")]
    evaluation: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    norms: Option<&'a StepNorms>,
}

/// The progress bar, and the files that grow with each step.
#[derive(Debug)]
pub(crate) struct Progress<'a> {
    bar: ProgressBar,
    files: Option<&'a Files>,
    metrics: Option<Metrics>,
    records: Vec<StepRecord>,
    ratios: Ratios,
}

/// Creates a bar of `steps` steps. It is silent if stderr is no terminal. Warnings are printed
/// above it.
pub fn bar(steps: u64, warnings: &Warnings) -> ProgressBar {
    let template = "{bar:32} {pos}/{len} {elapsed}, {eta} left  {msg}";
    let style = ProgressStyle::with_template(template).expect("a template that is tested");
    let bar = ProgressBar::new(steps).with_style(style);
    warnings.show_beside(&bar);
    bar
}

impl<'a> Progress<'a> {
    pub(crate) fn new(steps: u64, setup: &Setup<'a>) -> Self {
        let bar = bar(steps, setup.warnings());
        let (records, ratios) = (Vec::new(), Ratios::default());
        Self { bar, files: setup.files, metrics: None, records, ratios }
    }

    /// Starts at step `first`, which is about to run. Replaces the files of an earlier run, which
    /// stay until then.
    pub(crate) fn start(&mut self, first: u64) -> Result<(), Failure> {
        self.bar.set_position(first);
        // The time left is estimated from the steps of this run alone.
        self.bar.reset_eta();
        self.metrics = self.files.map(|files| files.begin(first)).transpose()?;
        Ok(())
    }

    /// Shows and records a completed step.
    pub(crate) fn add(
        &mut self,
        record: StepRecord,
        norms: Option<StepNorms>,
        evaluation: Option<f64>,
    ) -> Result<(), Failure> {
        let StepRecord { loss, grad_norm, seconds, .. } = record;
        let rate = record.tokens as f64 / seconds;
        self.bar
            .set_message(format!("loss {loss:.3}  gradient {grad_norm:.2}  {rate:.0} tokens/s"));
        self.bar.inc(1);
        if let Some(metrics) = &mut self.metrics {
            metrics.add(&Line { record: &record, evaluation, norms: norms.as_ref() })?;
        }
        self.ratios.add(record.step, norms);
        self.records.push(record);
        if let Some(files) = self.files.filter(|_| self.records.len() == TRACED_STEPS) {
            files.end_trace();
        }
        Ok(())
    }

    /// Ends the bar at the last completed step, draws the ratios of updates, and returns all
    /// records.
    pub(crate) fn finish(self) -> Result<Vec<StepRecord>, Failure> {
        match self.records.len() {
            // The bar would show step 0, though the run may have been resumed after its last step.
            0 => self.bar.finish_and_clear(),
            // A finished bar would show all steps, even if a signal has ended the run.
            _ => self.bar.abandon(),
        }
        if let Some(files) = self.files {
            self.ratios.draw(&files.norms())?;
        }
        Ok(self.records)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// Returns the bar and the progress of a resumed run, which makes one step of 10 ms.
    #[expect(clippy::disallowed_methods, reason = "the bar measures the time of a step")]
    fn resumed(steps: u64, first: u64) -> (ProgressBar, Progress<'static>) {
        let bar = bar(steps, &Warnings::of("test"));
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        let (records, ratios) = (Vec::new(), Ratios::default());
        let mut progress =
            Progress { bar: bar.clone(), files: None, metrics: None, records, ratios };
        progress.start(first).expect("no files");
        thread::sleep(Duration::from_millis(10));
        let record = StepRecord {
            step: first,
            loss: 1.0,
            grad_norm: 1.0,
            tokens: 1,
            seconds: 0.01,
            applied: true,
        };
        progress.add(record, None, None).expect("no files");
        (bar, progress)
    }

    #[test]
    fn a_bar_ends_at_the_last_step_that_was_made() {
        for (first, made) in [(4, 5), (9, 10)] {
            let (bar, progress) = resumed(10, first);
            progress.finish().expect("no files");
            assert_eq!((bar.position(), bar.is_finished()), (made, true));
        }
    }

    #[test]
    fn the_time_left_does_not_count_steps_of_an_earlier_run() {
        let (bar, _) = resumed(2_000_000, 1_000_000);
        assert!(bar.eta() > Duration::from_secs(1000), "{:?}", bar.eta());
    }
}
