//! The progress bar, and the records of steps.

use std::path::Path;

use hsdp::{Gradients, Norms, ShardedModel};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Serialize, Serializer};

use crate::failure::Failure;
use crate::folder::{Metrics, RunFiles, StepRecord, TRACED_STEPS, plot};
use crate::setup::Setup;
use crate::warnings::Warnings;

/// A line of `metrics.jsonl`, with norms of each parameter and an evaluation if there are any.
#[derive(Debug, Serialize)]
struct MetricsLine<'a> {
    #[serde(flatten)]
    record: &'a StepRecord,
    #[serde(skip_serializing_if = "Option::is_none")]
    evaluation: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    norms: Option<&'a StepNorms>,
}

/// The progress bar, and the files that grow with each step.
#[derive(Debug)]
pub(crate) struct RunProgress<'a> {
    bar: ProgressBar,
    files: Option<&'a RunFiles>,
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

impl<'a> RunProgress<'a> {
    pub(crate) fn new(steps: u64, setup: &Setup<'a>) -> Self {
        let bar = bar(steps, setup.warnings());
        let records = Vec::new();
        let ratios = Ratios::default();
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
            metrics.add(&MetricsLine { record: &record, evaluation, norms: norms.as_ref() })?;
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

/// Norms of each parameter in a step.
#[derive(Debug, Serialize)]
pub(crate) struct StepNorms {
    /// Norms of the gradients, before clipping.
    #[serde(serialize_with = "by_name")]
    gradients: Norms,
    /// Norms of the parameters, after the update.
    #[serde(serialize_with = "by_name")]
    parameters: Norms,
    /// The norm of each parameter's change over its norm before. `None` if there was no update, or
    /// an update on a device.
    #[serde(serialize_with = "by_name_if_any", skip_serializing_if = "Option::is_none")]
    updates: Option<Norms>,
}

/// Computes the norms of a step's gradients if the step is measured, and requests a measured
/// update. Collective.
pub(crate) fn before_update(
    model: &ShardedModel,
    gradients: Gradients,
    is_measured: bool,
) -> Result<(Gradients, Option<Norms>), Failure> {
    if !is_measured {
        return Ok((gradients, None));
    }
    let norms = gradients.norms(model)?;
    let gradients = if model.updates_on_device() { gradients } else { gradients.measured() };
    Ok((gradients, Some(norms)))
}

/// Returns the norms of a step after its update. `None` if the norms of its gradients were not
/// computed. Collective.
pub(crate) fn after_update(
    model: &ShardedModel,
    gradients: Option<Norms>,
) -> Result<Option<StepNorms>, Failure> {
    let Some(gradients) = gradients else { return Ok(None) };
    let updates = model.last_update().map(|update| update.ratios(model)).transpose()?;
    Ok(Some(StepNorms { gradients, parameters: model.norms()?, updates }))
}

/// Ratios of measured updates, for the plot at the end. Keeps no more steps than the plot has room
/// for.
#[derive(Debug, Default)]
pub(crate) struct Ratios(EvenSpread<(u64, Norms)>);

impl Ratios {
    /// Adds the ratios of a step.
    pub(crate) fn add(&mut self, step: u64, norms: Option<StepNorms>) {
        let Some(ratios) = norms.and_then(|norms| norms.updates) else { return };
        let most = plot::most_columns(ratios.iter().count());
        self.0.add((step, ratios), most);
    }

    /// Draws the ratios, if there are any.
    pub(crate) fn draw(&self, file: &Path) -> Result<(), Failure> {
        if self.0.kept.is_empty() { Ok(()) } else { plot::updates(file, &self.0.kept) }
    }
}

/// An evenly spread selection of the added items: every one, or every second, fourth and so on.
#[derive(Debug)]
struct EvenSpread<T> {
    kept: Vec<T>,
    added: usize,
    /// Number of added items for each kept one.
    of: usize,
}

impl<T> Default for EvenSpread<T> {
    fn default() -> Self {
        Self { kept: Vec::new(), added: 0, of: 1 }
    }
}

impl<T> EvenSpread<T> {
    /// Adds an item, and keeps at most `most` items. `most` is at least 1.
    fn add(&mut self, item: T, most: usize) {
        let is_kept = self.added.is_multiple_of(self.of);
        self.added += 1;
        if !is_kept {
            return;
        }
        self.kept.push(item);
        if self.kept.len() > most {
            let mut index = 0..;
            self.kept.retain(|_| index.next().is_some_and(|it: usize| it.is_multiple_of(2)));
            self.of *= 2;
        }
    }
}

fn by_name<S: Serializer>(norms: &Norms, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(norms.iter())
}

fn by_name_if_any<S: Serializer>(norms: &Option<Norms>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(norms.iter().flat_map(Norms::iter))
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// Returns the bar and the progress of a resumed run, which makes one step of 10 ms.
    #[expect(clippy::disallowed_methods, reason = "the bar measures the time of a step")]
    fn resumed(steps: u64, first: u64) -> (ProgressBar, RunProgress<'static>) {
        let bar = bar(steps, &Warnings::of("test"));
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        let records = Vec::new();
        let ratios = Ratios::default();
        let mut progress =
            RunProgress { bar: bar.clone(), files: None, metrics: None, records, ratios };
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

    #[test]
    fn what_is_kept_is_bounded_and_evenly_spread() {
        let kept = |added: usize, most| {
            let mut spread = EvenSpread::default();
            (0..added).for_each(|item| spread.add(item, most));
            spread.kept
        };
        assert_eq!(kept(4, 4), [0, 1, 2, 3]);
        assert_eq!(kept(5, 4), [0, 2, 4]);
        assert_eq!(kept(12, 4), [0, 4, 8]);
        assert_eq!(kept(1000, 1), [0]);
        assert_eq!(kept(100_000, 280).len(), 100_000_usize.div_ceil(512));
    }
}
