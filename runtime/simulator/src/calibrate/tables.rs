//! Measured times of training steps.

use hsdp_sharding::DType;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::computation::{Batch, GptShape, Recompute};
use crate::{Error, Machine, Time};

/// A training step of a GPT that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRow {
    /// Ranks, each with a card of its own.
    pub ranks: usize,
    /// Ranks of a shard group.
    pub shards: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// The data of a rank in one.
    pub batch: Batch,
    /// The model.
    pub model: GptShape,
}

impl StepRow {
    /// Returns the numbers of a machine that are fitted to such rows: on cards, whose kernels the
    /// host launches, or on cores, which compute themselves.
    #[must_use]
    pub const fn numbers(machine: &Machine) -> &'static [&'static str] {
        match machine.device() {
            Some(_) => &ON_CARDS,
            None => &ON_CORES,
        }
    }
}

const ON_CARDS: [&str; 6] = [
    "memory.efficiency",
    "compute.efficiency",
    "compute.unaligned",
    "compute.half",
    "compute.launch",
    "compute.kernel",
];
/// Calls of operations are too small a part of the steps that `benches/cpu_steps.sh` measures to
/// tell their time.
const ON_CORES: [&str; 2] = ["memory.efficiency", "compute.efficiency"];

/// A row, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StepLine {
    gpus: u64,
    global_batch: u64,
    micro_batch: u64,
    width: u64,
    heads: u64,
    layers: u64,
    context: u64,
    step_ms: f64,
    shards: Option<u64>,
    vocabulary: Option<u64>,
    recompute: Option<String>,
    dtype: Option<DType>,
}

const MOST: u64 = 1_000_000;
/// Each layer is a unit with parameters of its own.
const MOST_LAYERS: u64 = 10_000;
/// Maximum number of layers of all rows together. A fit holds the plans of all rows, which take
/// about 6 KB a layer.
const MOST_LAYERS_OF_ROWS: usize = 250_000;
/// Vocabulary of GPT-2.
const VOCABULARY: u64 = 50_257;

/// Reads a CSV with the columns `gpus, global_batch, micro_batch, width, heads, layers, context,
/// step_ms`, in any order.
///
/// It may have columns `shards` (1 where it is missing or empty), `vocabulary` (50257), `recompute`
/// (`nothing`, `attention`, which is the default, or `unit`), and `dtype` (`f16`; `bf16` or `f32`).
/// A microbatch has `micro_batch` sequences on each of the `gpus`.
///
/// # Errors
/// [`Error::Table`], with the line, if a column is missing, unknown or no number, if a number is
/// out of its range, if `gpus * micro_batch` does not divide `global_batch`, `shards` not `gpus`,
/// or `heads` not `width`, or if there are no rows, more than 100,000, or more than 250,000 layers
/// of all rows together.
pub fn read_steps(text: &str) -> Result<Vec<(StepRow, Time)>, Error> {
    let mut layers = 0;
    read_table(text, |raw: StepLine| {
        let row = row(&raw)?;
        layers += row.model.layers;
        if layers > MOST_LAYERS_OF_ROWS {
            return Err(format!(
                "the rows up to here have {layers} layers: expected at most {MOST_LAYERS_OF_ROWS}"
            ));
        }
        Ok((row, measured_time(raw.step_ms, 1e-3, "step_ms")?))
    })
}

fn row(raw: &StepLine) -> Result<StepRow, String> {
    let ranks = count(raw.gpus, MOST, "gpus")?;
    let shards = count(raw.shards.unwrap_or(1), MOST, "shards")?;
    let global = count(raw.global_batch, MOST * MOST, "global_batch")?;
    let model = model(raw)?;
    let batch = batch(raw)?;
    let sequences = ranks.saturating_mul(batch.sequences);
    divides(sequences, global, "gpus * micro_batch", "global_batch")?;
    divides(shards, ranks, "shards", "gpus")?;
    divides(model.heads, model.width, "heads", "width")?;
    Ok(StepRow { ranks, shards, microbatches: global / sequences, batch, model })
}

fn model(raw: &StepLine) -> Result<GptShape, String> {
    Ok(GptShape {
        width: count(raw.width, MOST, "width")?,
        heads: count(raw.heads, MOST, "heads")?,
        layers: count(raw.layers, MOST_LAYERS, "layers")?,
        context: count(raw.context, MOST, "context")?,
        vocabulary: count(raw.vocabulary.unwrap_or(VOCABULARY), MOST, "vocabulary")?,
    })
}

fn batch(raw: &StepLine) -> Result<Batch, String> {
    Ok(Batch {
        sequences: count(raw.micro_batch, MOST, "micro_batch")?,
        context: count(raw.context, MOST, "context")?,
        dtype: training(raw.dtype.unwrap_or(DType::F16))?,
        recompute: match &raw.recompute {
            Some(text) => text.parse().map_err(|error: Error| error.to_string())?,
            None => Recompute::Attention,
        },
    })
}

fn training(dtype: DType) -> Result<DType, String> {
    DType::of_training(dtype.name()).map_err(|error| error.to_string())
}

fn divides(divisor: usize, number: usize, name: &str, of: &str) -> Result<(), String> {
    match number.is_multiple_of(divisor) {
        true => Ok(()),
        false => Err(format!("{name} is {divisor}, which does not divide {of}, {number}")),
    }
}

/// An all-reduce that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllReduceRow {
    /// Its members, each with a card of its own.
    pub members: usize,
    /// The bytes of a member's buffer.
    pub bytes: u64,
}

impl AllReduceRow {
    /// The numbers of a machine with cards that are fitted to such rows.
    pub const NUMBERS: [&str; 2] = ["calls.start", "links.machine.efficiency"];
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AllReduceLine {
    gpus: u64,
    bytes: u64,
    us: f64,
}

const MOST_MEMBERS: u64 = 1_000_000;
const MOST_BYTES: u64 = 1 << 50;

/// Reads a CSV with the columns `gpus, bytes, us`.
///
/// # Errors
/// [`Error::Table`], with the line, if a column is missing, unknown or no number, if a number is
/// out of its range, or if there are no rows or more than 100,000.
pub fn read_all_reduces(text: &str) -> Result<Vec<(AllReduceRow, Time)>, Error> {
    read_table(text, |AllReduceLine { gpus, bytes, us }| {
        let members = count(gpus, MOST_MEMBERS, "gpus")?;
        count(bytes, MOST_BYTES, "bytes")?;
        Ok((AllReduceRow { members, bytes }, measured_time(us, 1e-6, "us")?))
    })
}

/// The most rows of a table.
const MOST_ROWS: usize = 100_000;

/// Reads a table with a header, row by row, through `check`, which may refuse one.
fn read_table<Line: DeserializeOwned, Row>(
    text: &str,
    mut check: impl FnMut(Line) -> Result<Row, String>,
) -> Result<Vec<Row>, Error> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text.as_bytes());
    let headers = reader.headers().map_err(|error| unreadable(&error))?.clone();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| unreadable(&error))?;
        let line = record.position().map_or(1, csv::Position::line);
        if rows.len() == MOST_ROWS {
            return Err(refused(line, format!("more than {MOST_ROWS} rows")));
        }
        let raw = record.deserialize(Some(&headers)).map_err(|error| unreadable(&error))?;
        rows.push(check(raw).map_err(|problem| refused(line, problem))?);
    }
    match rows.is_empty() {
        true => Err(refused(1, "no rows".into())),
        false => Ok(rows),
    }
}

/// Returns a time in units of `unit` seconds; a problem if it is not above 0, or too long.
fn measured_time(value: f64, unit: f64, name: &str) -> Result<Time, String> {
    let time = Time::from_seconds(value * unit).filter(|time| *time > Time::ZERO);
    time.ok_or_else(|| format!("{name} is {value}: expected a time above 0 and below 213 days"))
}

/// Returns a number of things, from 1 to `most`.
pub(super) fn count(value: u64, most: u64, name: &str) -> Result<usize, String> {
    let found = Some(value).filter(|value| (1..=most).contains(value));
    let found = found.and_then(|value| usize::try_from(value).ok());
    found.ok_or_else(|| format!("{name} is {value}: expected 1 to {most}"))
}

fn unreadable(error: &csv::Error) -> Error {
    let line = error.position().map_or(1, csv::Position::line);
    let problem = match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => match err.field() {
            Some(field) => format!("column {}: {}", field + 1, err.kind()),
            None => err.kind().to_string(),
        },
        _ => error.to_string(),
    };
    refused(line, problem)
}

fn refused(line: u64, problem: String) -> Error {
    Error::Table { line, problem: problem.split_whitespace().collect::<Vec<_>>().join(" ") }
}
