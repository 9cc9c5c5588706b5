//! The end of a run: the printed report, and `summary.json`.

use comfy_table::Table;
use hsdp::Precision;
use hsdp_candle::Plain;
use hsdp_models::gpt::{self, Draw};
use serde_json::{Value, json};

use super::shared::failure::Failure;
use super::shared::messages::messages_summary;
use super::shared::tables::{
    applied, exactness, losses, memory_table, rank_summary, table, traffic_table,
};
use super::train::{Job, Run};

const SAMPLE_LENGTH: usize = 240;
const SAMPLE_TEMPERATURE: f32 = 0.8;

/// Prints tables and a sample to stdout. A resumed run that had no step to make is one line.
pub(crate) fn print(job: &Job<'_>, run: &Run) -> Result<(), Failure> {
    let text = match run.records.is_empty() {
        true => format!("all {} steps are made\n", job.options.steps),
        false => text(job, run)?,
    };
    hsdp_train::print(text).map_err(Failure::Output)
}

fn text(job: &Job<'_>, run: &Run) -> Result<String, Failure> {
    let costs = &run.costs[0];
    let text = format!("{}\n\n{}\n", overview(job, run), traffic_table(costs, run.records.len()));
    Ok(format!(
        "{text}{}\n\n{}\n\nsample:\n{}\n",
        exactness(&run.costs),
        memory_table(costs),
        sample(job, run)?
    ))
}

fn overview(job: &Job<'_>, run: &Run) -> Table {
    let spec = job.gpt.config().spec();
    let [first, last] = losses(&run.records);
    let seconds: f64 = run.records.iter().map(|record| record.seconds).sum();
    let tokens: u64 = run.records.iter().map(|record| record.tokens).sum();
    let mut rows = vec![
        [
            "text".to_owned(),
            format!("{} characters, {} different", job.corpus.len(), job.corpus.vocabulary()),
        ],
        ["parameters".to_owned(), format!("{} in {} units", spec.numel().0, spec.units().len())],
        ["loss, first step".to_owned(), format!("{first:.4}")],
        ["loss, last step".to_owned(), format!("{last:.4}")],
        ["speed".to_owned(), format!("{:.0} tokens/s", tokens as f64 / seconds)],
    ];
    let skipped = run.records.len() - applied(&run.records);
    if skipped > 0 {
        rows.push([
            "skipped".to_owned(),
            format!("{skipped} steps, in which a gradient overflowed"),
        ]);
    }
    if run.warnings > 0 {
        rows.push(["warnings".to_owned(), run.warnings.to_string()]);
    }
    if let Some(verified) = &run.verified {
        rows.push(["verified".to_owned(), verified.to_string()]);
    }
    table(["a run", &format!("{} steps on mesh {}", run.records.len(), job.options.run.mesh)], rows)
}

/// Text that the trained model writes after the text's first line.
fn sample(job: &Job<'_>, run: &Run) -> Result<String, Failure> {
    let plain = Plain::new(job.gpt.config().spec(), &run.parameters, Precision::default())?;
    let draw =
        Draw { count: SAMPLE_LENGTH, temperature: SAMPLE_TEMPERATURE, seed: job.options.seed };
    let tokens = gpt::sample(&job.gpt, &plain, &job.corpus.prompt(), draw)?;
    Ok(job.corpus.text(&tokens))
}

/// The contents of `summary.json`: totals of the run, by rank.
pub(crate) fn summary(job: &Job<'_>, run: &Run) -> Value {
    let spec = job.gpt.config().spec();
    let [first, last] = losses(&run.records);
    let ranks: Vec<Value> =
        run.costs.iter().enumerate().map(|(rank, costs)| rank_summary(rank, costs)).collect();
    json!({
        "mesh": job.options.run.mesh.to_string(),
        "steps": run.records.len(),
        "applied": applied(&run.records),
        "microbatches": job.options.run.microbatches,
        "param_dtype": job.options.run.param_dtype.to_string(),
        "reduce_dtype": job.options.run.reduce_dtype.to_string(),
        "accumulation": job.options.run.accumulation.to_string(),
        "parameters": spec.numel().0,
        "units": spec.units().len(),
        "loss": { "first": first, "last": last },
        "seconds": run.records.iter().map(|record| record.seconds).sum::<f64>(),
        "warnings": run.warnings,
        "verified": run.verified.as_ref().map(ToString::to_string),
        "messages": messages_summary(run.messages),
        "ranks": ranks,
    })
}
