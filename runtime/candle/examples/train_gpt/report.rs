//! The end of a run: the printed report, and `summary.json`.

use comfy_table::{CellAlignment, Table, presets};
use hsdp::{ByteCount, Flow, Precision};
use hsdp_candle::Plain;
use hsdp_candle::gpt::{self, Draw};
use serde_json::{Value, json};

use super::costs::{self, Compared, Costs};
use super::failure::Failure;
use super::train::{Job, Run};

const SAMPLE_LENGTH: usize = 240;
const SAMPLE_TEMPERATURE: f32 = 0.8;

/// Prints tables and a sample to stdout. A resumed run that had no step to make is one line.
pub(crate) fn print(job: &Job<'_>, run: &Run) -> Result<(), Failure> {
    let text = match run.records.is_empty() {
        true => format!("all {} steps are made\n", job.options.steps),
        false => text(job, run)?,
    };
    hsdp_program::print(text).map_err(Failure::Output)
}

fn text(job: &Job<'_>, run: &Run) -> Result<String, Failure> {
    let costs = &run.costs[0];
    let text = format!("{}\n\n{}\n", overview(job, run), traffic_table(costs, run.records.len()));
    Ok(format!(
        "{text}{}\n\n{}\n\nsample:\n{}\n",
        exactness(run),
        memory_table(costs),
        sample(job, run)?
    ))
}

fn overview(job: &Job<'_>, run: &Run) -> Table {
    let spec = job.gpt.config().spec();
    let [first, last] = losses(run);
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
    let skipped = run.records.len() - applied(run);
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
    table(["a run", &format!("{} steps on mesh {}", run.records.len(), job.options.mesh)], rows)
}

/// Steps that have updated the parameters.
fn applied(run: &Run) -> usize {
    run.records.iter().filter(|record| record.applied).count()
}

fn losses(run: &Run) -> [f64; 2] {
    [run.records.first(), run.records.last()]
        .map(|record| record.map_or(f64::NAN, |record| record.loss))
}

fn traffic_table(costs: &Costs, steps: usize) -> Table {
    let a_step = |total: u64| (total / steps as u64).to_string();
    let rows = costs.traffic.iter().map(|(op, Compared { planned, measured })| {
        let [calls_planned, calls] = [planned, measured].map(|flow| a_step(flow.calls));
        let [bytes_planned, bytes] = [planned, measured].map(|flow| a_step(flow.bytes.get()));
        [op.to_string(), calls_planned, calls, bytes_planned, bytes]
    });
    table(["a step of rank 0", "calls planned", "measured", "bytes planned", "measured"], rows)
}

fn exactness(run: &Run) -> String {
    costs::check_traffic(&run.costs).unwrap_or_else(|failure| failure.to_string())
}

fn memory_table(costs: &Costs) -> Table {
    let used =
        |compared: &Compared<ByteCount>| compared.planned.max(compared.measured) > ByteCount::ZERO;
    let rows =
        costs.memory.iter().filter(|(_, compared)| used(compared)).map(|(category, compared)| {
            let Compared { planned, measured } = compared;
            [category.to_string(), planned.to_string(), measured.to_string()]
        });
    table(["peak memory of rank 0", "planned", "measured"], rows)
}

/// A table with words on the left and numbers on the right.
fn table<const COLUMNS: usize>(
    header: [&str; COLUMNS],
    rows: impl IntoIterator<Item = [String; COLUMNS]>,
) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header).add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
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
    let [first, last] = losses(run);
    let ranks: Vec<Value> =
        run.costs.iter().enumerate().map(|(rank, costs)| rank_summary(rank, costs)).collect();
    json!({
        "mesh": job.options.mesh.to_string(),
        "steps": run.records.len(),
        "applied": applied(run),
        "microbatches": job.options.microbatches,
        "param_dtype": job.options.param_dtype.to_string(),
        "reduce_dtype": job.options.reduce_dtype.to_string(),
        "accumulation": job.options.accumulation.to_string(),
        "parameters": spec.numel().0,
        "units": spec.units().len(),
        "loss": { "first": first, "last": last },
        "seconds": run.records.iter().map(|record| record.seconds).sum::<f64>(),
        "warnings": run.warnings,
        "verified": run.verified.as_ref().map(ToString::to_string),
        "ranks": ranks,
    })
}

fn rank_summary(rank: usize, costs: &Costs) -> Value {
    let flow = |flow: Flow| json!({ "calls": flow.calls, "bytes": flow.bytes.get() });
    let traffic = costs.traffic.iter().map(|(op, compared)| {
        let sides =
            json!({ "planned": flow(compared.planned), "measured": flow(compared.measured) });
        (op.to_string(), sides)
    });
    let memory = costs.memory.iter().map(|(category, compared)| {
        let sides =
            json!({ "planned": compared.planned.get(), "measured": compared.measured.get() });
        (category.to_string(), sides)
    });
    json!({
        "rank": rank,
        "collectives": traffic.collect::<serde_json::Map<_, _>>(),
        "peak_memory_bytes": memory.collect::<serde_json::Map<_, _>>(),
    })
}
