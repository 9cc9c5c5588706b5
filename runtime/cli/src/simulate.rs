//! `hsdp simulate`: predicts the time of a step on a machine, and its parts, before anything runs.

mod traces;

use std::error::Error;
use std::iter;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use hsdp_sharding::Offload;
use hsdp_simulator::{
    Batch, Level, Machine, Microbatches, Prediction, RankTiming, Recompute, Share, Time, Workload,
};
use hsdp_train::stderr::in_one_line;
use hsdp_train::stdout::table;
use hsdp_train::{print, print_json};
use serde_json::{Map, Value, json};

use crate::CommandOutcome;
use crate::calibrate::against;
use crate::model::{find_machine, memory_of};
use crate::plan::PlanDevice;
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
pub(crate) struct SimulateArgs {
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
pub(crate) fn run(options: &SimulateArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let machine = find_machine(&options.machine)?;
    if let Some(table) = &options.against {
        return against(table, &machine);
    }
    let choices = options.choices.as_ref().ok_or("a model and a mesh are missing, or --against")?;
    let outputs = traces::TraceOutputs::check(options, choices)?;
    let workload = workload(options, choices, &machine)?;
    let prediction = workload.predict(&machine)?;
    check_time(prediction.timing.step, &machine)?;
    let simulated = Simulated { choices, machine, workload, prediction };
    traces::write(&simulated, &outputs)?;
    match options.json {
        true => print_json(&in_json(&simulated))?,
        false => print(report(&simulated))?,
    }
    Ok(CommandOutcome::Well)
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
    options: &SimulateArgs,
    choices: &Choices,
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
fn device(choices: &Choices, machine: &Machine) -> Result<PlanDevice, String> {
    match (machine.device(), choices.offload) {
        (Some(_), _) => Ok(PlanDevice::Cuda),
        (None, Offload::None) => Ok(PlanDevice::Cpu),
        (None, offload) => Err(format!(
            "--offload {offload}: {} has no device, so there is nothing to offload",
            machine.name
        )),
    }
}

/// Returns the whole prediction. Times are in seconds.
fn in_json(simulated: &Simulated<'_>) -> Value {
    let Simulated { choices, machine, workload, prediction, .. } = simulated;
    let ranks = prediction.timing.ranks.iter().enumerate().map(|(color, rank)| {
        let share =
            |share: Share| (share.name().to_owned(), rank.shares.of(share).seconds().into());
        json!({
            "first": rank.first.get(),
            "count": rank.count,
            "seconds": rank.step.seconds(),
            "shares": Share::ALL.map(share).into_iter().collect::<Map<_, _>>(),
            "links": {
                "machine": prediction.link_utilisation(color, Level::Machine),
                "network": prediction.link_utilisation(color, Level::Network),
            },
        })
    });
    let memory = &prediction.memory;
    let parts = memory.parts().map(|(name, bytes)| (name.to_owned(), bytes.get().into()));
    json!({
        "model": choices.model,
        "machine": machine.name,
        "mesh": [workload.plan.mesh().replicate_size(), workload.plan.mesh().shard_size()],
        "seconds": prediction.timing.step.seconds(),
        "tokens": prediction.tokens,
        "tokens_per_second": prediction.tokens_per_second(),
        "flops": prediction.flops,
        "flops_utilisation": prediction.flops_utilisation(),
        "ranks": ranks.collect::<Vec<_>>(),
        "memory": {
            "total": memory.total().get(),
            "capacity": memory_of(machine, workload.plan.mesh().world_size()).get(),
            "parts": parts.into_iter().collect::<Map<_, _>>(),
            "on_host": memory.offloaded.total().get(),
        },
    })
}

/// Returns the tables of time and memory.
fn report(simulated: &Simulated<'_>) -> String {
    let parts = [heading(simulated), times(simulated), links(simulated), memory(simulated)];
    parts.join("\n")
}

fn heading(simulated: &Simulated<'_>) -> String {
    let Simulated { choices, machine, workload, prediction, .. } = simulated;
    let mesh = workload.plan.mesh();
    let step = prediction.timing.step;
    let ranks = mesh.world_size();
    let speed = prediction.tokens_per_second();
    format!(
        "{} on {}, mesh {mesh}: a step of {} tokens takes {step}\n\
         {speed:.0} tokens/s, {:.1} on each of {ranks} ranks; model flops utilisation {:.1} %",
        in_one_line(&choices.model),
        in_one_line(&machine.name),
        prediction.tokens,
        speed / ranks as f64,
        100.0 * prediction.flops_utilisation(),
    )
}

/// Describes the parts of the step's time, on ranks of each color.
fn times(simulated: &Simulated<'_>) -> String {
    let ranks = &simulated.prediction.timing.ranks;
    let names = ranks.iter().take(MOST_COLORS).map(name);
    let rows = Share::ALL.map(|share| {
        let of = |rank: &RankTiming| {
            let time = rank.shares.of(share);
            let part = 100.0 * time.seconds() / simulated.prediction.timing.step.seconds();
            format!("{time} ({part:.1} %)")
        };
        let times = ranks.iter().take(MOST_COLORS).map(of);
        Vec::from_iter(iter::once(share.name().to_owned()).chain(times))
    });
    let table = table(iter::once("part of the step".to_owned()).chain(names), rows);
    match ranks.len().saturating_sub(MOST_COLORS) {
        0 => table.to_string(),
        hidden => format!("{table}\nand {hidden} more kinds of ranks, which --json has"),
    }
}

/// Maximum number of colors of ranks in the table.
const MOST_COLORS: usize = 4;

fn name(ranks: &RankTiming) -> String {
    match ranks.count {
        1 => format!("rank {}", ranks.first),
        count => format!("rank {} and {} like it", ranks.first, count - 1),
    }
}

/// Describes the use of links, on the ranks that use them most.
fn links(simulated: &Simulated<'_>) -> String {
    let prediction = &simulated.prediction;
    let colors = 0..prediction.timing.ranks.len();
    let parts = |level| colors.clone().map(move |color| prediction.link_utilisation(color, level));
    let part = |level| 100.0 * parts(level).fold(0.0, f64::max);
    let inside = part(Level::Machine);
    let between = part(Level::Network);
    match simulated.machine.device() {
        Some(_) => format!(
            "links are busy for at most {inside:.1} % of the step in a machine, {between:.1} % between machines"
        ),
        None => format!("collectives use memory for at most {inside:.1} % of the step"),
    }
}

fn memory(simulated: &Simulated<'_>) -> String {
    [on_rank(simulated), on_host(simulated)].join("")
}

fn on_rank(simulated: &Simulated<'_>) -> String {
    let memory = &simulated.prediction.memory;
    let parts = memory.parts().into_iter().filter(|(_, bytes)| bytes.get() > 0);
    let parts: Vec<String> = parts.map(|(name, bytes)| format!("{name} {bytes}")).collect();
    let mut text = format!("memory of a rank {}: {}", memory.total(), parts.join(", "));
    let capacity = memory_of(&simulated.machine, simulated.workload.plan.mesh().world_size());
    if memory.total() > capacity {
        text +=
            &format!("\nthat is more than the {capacity} that a rank has: the step does not fit");
    }
    text
}

/// Describes the host's memory, if parts are offloaded.
fn on_host(simulated: &Simulated<'_>) -> String {
    let each = simulated.prediction.memory.offloaded.total();
    let machine = &simulated.machine;
    let ranks = simulated.workload.plan.mesh().world_size();
    let Some(device) = machine.device().filter(|_| each.get() > 0) else { return String::new() };
    let text = format!("\nmemory of a rank in the host's: {each}");
    match machine.host_holds(each, ranks) {
        true => text,
        false => {
            let capacity = device.host.capacity.clone();
            format!(
                "{text}\nthat of all ranks of a host is more than its {capacity}: the step does not fit"
            )
        }
    }
}
