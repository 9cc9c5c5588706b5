//! `hsdp simulate`: predicts the time of a step on a machine, and its parts, before anything runs.

mod against;
mod json;
mod report;
mod traces;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use hsdp_sharding::Offload;
use hsdp_simulator::{Batch, Machine, Microbatches, Prediction, Recompute, Time, Workload};
use hsdp_train::{print, print_json};

use crate::machine;
use crate::outcome::Outcome;
use crate::plan::Device;
use crate::plan::choices::Choices;

/// Maximum number of sequences in a microbatch, and of tokens in a sequence, for which counts of
/// flops and bytes are exact enough.
const MAX_BATCH: u64 = 1 << 20;
pub(crate) const MAX_CONTEXT: u64 = 1 << 24;

/// Default number of tokens of a sequence.
pub(crate) const CONTEXT: u64 = 2048;

/// Options of `hsdp simulate`.
#[derive(Args, Debug)]
#[command(
    override_usage = "hsdp simulate [OPTIONS] --mesh <RxS> --machine <MACHINE> <MODEL>\n       hsdp simulate --against <CSV> --machine <MACHINE>"
)]
pub(crate) struct Options {
    #[command(flatten)]
    choices: Option<Choices>,

    /// Predict measured steps instead, of a table as CSV (SIMULATE.md) of at most 16 MiB
    #[arg(long, value_name = "CSV", conflicts_with_all = ["Choices", "batch", "context", "recompute", "keep", "json", "trace", "chakra"])]
    against: Option<PathBuf>,

    /// Machine on which the ranks compute: a file (MACHINES.md), or a100-node, a100-cluster,
    /// h100-cluster or two-core-cpu
    #[arg(long, value_name = "MACHINE")]
    machine: String,

    /// Sequences of a microbatch, on each rank
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=MAX_BATCH))]
    batch: u64,

    /// Tokens of a sequence
    #[arg(long, value_name = "TOKENS", default_value_t = CONTEXT, value_parser = clap::value_parser!(u64).range(1..=MAX_CONTEXT))]
    context: u64,

    /// Part of a unit that its backward computes again, instead of keeping it: nothing, attention
    /// or unit
    #[arg(long, value_name = "PART", default_value = "nothing", num_args = 0..=1, default_missing_value = "unit", require_equals = true)]
    recompute: Recompute,

    /// Keep all units gathered from their forward to their backward
    #[arg(long)]
    keep: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Also write what ranks do in the step into this file, which ui.perfetto.dev opens
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Also write a Chakra execution trace of each rank (step.RANK.et), and the groups of ranks
    /// (groups.json), into this new folder
    #[arg(long, value_name = "DIR")]
    chakra: Option<PathBuf>,
}

/// A simulated step.
struct Simulated<'a> {
    choices: &'a Choices,
    machine: Machine,
    workload: Workload,
    prediction: Prediction,
}

/// Simulates a step and prints its time, or simulates the steps of a table.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let machine = machine::find(&options.machine)?;
    if let Some(table) = &options.against {
        return against::run(table, &machine);
    }
    let choices = options.choices.as_ref().ok_or("a model and a mesh are missing, or --against")?;
    let outputs = traces::Outputs::check(options, choices)?;
    let workload = workload((options, choices), &machine)?;
    let prediction = workload.predict(&machine)?;
    check_time(prediction.timing.step, &machine)?;
    let simulated = Simulated { choices, machine, workload, prediction };
    traces::write(&simulated, &outputs)?;
    match options.json {
        true => print_json(&json::of(&simulated))?,
        false => print(report::text(&simulated))?,
    }
    Ok(Outcome::Well)
}

/// Refuses a step that takes no time, because its speed would not be a number.
///
/// # Errors
/// A text of one line.
pub(crate) fn check_time(step: Time, machine: &Machine) -> Result<(), String> {
    match step {
        Time::ZERO => {
            Err(format!("a step takes less than a picosecond on {}: it has no speed", machine.name))
        }
        _ => Ok(()),
    }
}

fn workload(
    (options, choices): (&Options, &Choices),
    machine: &Machine,
) -> Result<Workload, Box<dyn Error>> {
    let device = device(choices, machine)?;
    choices.check(device)?;
    let mut model = choices.model(device)?;
    if options.keep {
        model.spec = model.spec.all_kept();
    }
    model.check_context(options.context)?;
    let plan = choices.plan(&model)?;
    let batch = Batch {
        sequences: usize::try_from(options.batch)?,
        context: usize::try_from(options.context)?,
        dtype: choices.param_dtype,
        recompute: options.recompute,
    };
    Ok(Workload {
        plan: Arc::new(plan),
        computation: Arc::new(model.computation()?),
        batch,
        microbatches: Microbatches::Given(choices.microbatches),
        offload: choices.offload,
    })
}

/// Returns the memory that holds the model on a machine.
fn device(choices: &Choices, machine: &Machine) -> Result<Device, String> {
    match (machine.device(), choices.offload) {
        (Some(_), _) => Ok(Device::Cuda),
        (None, Offload::None) => Ok(Device::Cpu),
        (None, offload) => Err(format!(
            "--offload {offload}: {} has no device, so there is nothing to offload",
            machine.name
        )),
    }
}
