//! Measured times of training steps.

use hsdp_sharding::DType;
use serde::Deserialize;

use super::table;
use crate::computation::{Batch, Gpt, Recompute};
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
    pub model: Gpt,
}

impl StepRow {
    /// The numbers of a machine that are fitted to such rows: on cards, whose kernels the host launches, or on cores, which compute themselves.
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
/// Calls of operations are too small a part of the steps that `benches/cpu_steps.sh` measures to tell their time.
const ON_CORES: [&str; 2] = ["memory.efficiency", "compute.efficiency"];

/// A row, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
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
/// Of all rows together: a fit holds the plans of all rows, which take about 6 KB a layer.
const MOST_LAYERS_OF_ROWS: usize = 250_000;
/// Of GPT-2.
const VOCABULARY: u64 = 50_257;

/// Reads a CSV with the columns `gpus, global_batch, micro_batch, width, heads, layers, context, step_ms`, in any order.
///
/// It may have columns `shards` (1 where it is missing or empty), `vocabulary` (50257), `recompute` (`nothing`, `attention`, which is the default, or
/// `unit`), and `dtype` (`f16`; `bf16` or `f32`). A microbatch has `micro_batch` sequences on each of the `gpus`.
///
/// # Errors
/// [`Error::Table`], with the line, if a column is missing, unknown or no number, if a number is out of its range, if `gpus * micro_batch` does not
/// divide `global_batch`, `shards` not `gpus`, or `heads` not `width`, or if there are no rows, more than 100,000, or more than 250,000
/// layers of all rows together.
pub fn read_steps(text: &str) -> Result<Vec<(StepRow, Time)>, Error> {
    let mut layers = 0;
    table::read(text, |raw: Raw| {
        let row = row(&raw)?;
        layers += row.model.layers;
        if layers > MOST_LAYERS_OF_ROWS {
            return Err(format!(
                "the rows up to here have {layers} layers: expected at most {MOST_LAYERS_OF_ROWS}"
            ));
        }
        Ok((row, table::time(raw.step_ms, 1e-3, "step_ms")?))
    })
}

fn row(raw: &Raw) -> Result<StepRow, String> {
    let ranks = table::count(raw.gpus, MOST, "gpus")?;
    let shards = table::count(raw.shards.unwrap_or(1), MOST, "shards")?;
    let global = table::count(raw.global_batch, MOST * MOST, "global_batch")?;
    let model = model(raw)?;
    let batch = batch(raw)?;
    let sequences = ranks.saturating_mul(batch.sequences);
    divides(sequences, global, "gpus * micro_batch", "global_batch")?;
    divides(shards, ranks, "shards", "gpus")?;
    divides(model.heads, model.width, "heads", "width")?;
    Ok(StepRow { ranks, shards, microbatches: global / sequences, batch, model })
}

fn model(raw: &Raw) -> Result<Gpt, String> {
    Ok(Gpt {
        width: table::count(raw.width, MOST, "width")?,
        heads: table::count(raw.heads, MOST, "heads")?,
        layers: table::count(raw.layers, MOST_LAYERS, "layers")?,
        context: table::count(raw.context, MOST, "context")?,
        vocabulary: table::count(raw.vocabulary.unwrap_or(VOCABULARY), MOST, "vocabulary")?,
    })
}

fn batch(raw: &Raw) -> Result<Batch, String> {
    Ok(Batch {
        sequences: table::count(raw.micro_batch, MOST, "micro_batch")?,
        context: table::count(raw.context, MOST, "context")?,
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
