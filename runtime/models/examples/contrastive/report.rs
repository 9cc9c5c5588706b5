//! The progress bar while training runs, and the report at its end.

use hsdp_train::{Failure, Warnings};
use indicatif::{ProgressBar, ProgressStyle};

use super::options::Options;
use super::train::Run;
use super::verify::Verified;

/// Lines of the table at the end.
const LINES: usize = 10;

/// The results of a step, before its update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) step: usize,
    /// The mean over all ranks' pairs, in both directions.
    pub(crate) loss: f64,
    /// The fraction of all views whose partner is the nearest of all ranks' views.
    pub(crate) accuracy: f64,
}

/// The progress bar.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    records: Vec<Record>,
}

impl Progress {
    /// A bar of `steps` steps, which is silent where stderr is no terminal. Warnings are shown beside it.
    pub(crate) fn new(steps: usize, warnings: &Warnings) -> Result<Self, Failure> {
        let template = "{bar:32} {pos}/{len} {elapsed}  {msg}";
        let style = ProgressStyle::with_template(template).map_err(Failure::work)?;
        let bar = ProgressBar::new(steps as u64).with_style(style);
        warnings.show_beside(&bar);
        Ok(Self { bar, records: Vec::new() })
    }

    /// Shows and records a step that is done.
    pub(crate) fn add(&mut self, record: Record) {
        let Record { loss, accuracy, .. } = record;
        self.bar.set_message(format!("loss {loss:.3}  {:.1} % found", 100.0 * accuracy));
        self.bar.inc(1);
        self.records.push(record);
    }

    /// Ends the bar, and returns all records.
    pub(crate) fn finish(self) -> Vec<Record> {
        self.bar.finish();
        self.records
    }
}

/// The means of each tenth of the steps, the number of warnings if there were any, and the result of `--verify`.
pub(crate) fn text(options: &Options, run: &Run, warnings: u64) -> String {
    let Options { ranks, batch, .. } = *options;
    let mut lines = vec![
        format!("{ranks} ranks with {} of {batch} pairs each", options.share()),
        format!("{:>12}  {:>8}  {:>8}", "steps", "loss", "found"),
    ];
    for part in run.records.chunks(run.records.len().div_ceil(LINES).max(1)) {
        let mean = |of: fn(&Record) -> f64| part.iter().map(of).sum::<f64>() / part.len() as f64;
        let steps = format!("{}-{}", part[0].step, part[0].step + part.len() - 1);
        let (loss, accuracy) = (mean(|record| record.loss), mean(|record| record.accuracy));
        lines.push(format!("{steps:>12}  {loss:>8.4}  {:>6.1} %", 100.0 * accuracy));
    }
    if warnings > 0 {
        lines.push(format!("{:>12}  {warnings:>8}", "warnings"));
    }
    lines.extend(run.verified.map(|verified| comparison(options, verified)));
    lines.join("\n")
}

fn comparison(options: &Options, Verified { apart, bound }: Verified) -> String {
    let steps = options.steps;
    match bound {
        0.0 => format!("losses and parameters of {steps} steps bit-identical to plain candle's"),
        bound => format!(
            "losses and parameters of {steps} steps within {apart:.1e} of plain candle's with the whole batch; rounding \
             explains up to {bound:.1e}"
        ),
    }
}
