//! `hsdp plan`: computes the memory and the traffic of a model's training step, before anything
//! runs.

pub(crate) mod choices;
mod picture;
mod report;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use hsdp_sharding::step::{DryRun, Output, Rules, Sequences, UnitOrder};
use hsdp_sharding::{AfterForward, Flow, Plan, UnitId};
use hsdp_simulator::{Microbatches, ModelPlacement, Order, Schedules};
use hsdp_train::{print, print_json};
use serde_json::{Map, Value, json};

use self::choices::{Choices, PlannedOptimizer};
use self::report::{MemoryPlace, StepTraffic};
use crate::model::Model;
use crate::output::cannot_write;
use crate::{CommandOutcome, output};

/// Options of `hsdp plan`.
#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    choices: Choices,

    /// Device that holds the model
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: PlanDevice,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Also draw the shards of each unit, and the ranks that own them, as SVG into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Also write the operations of all ranks in a step, for `hsdp check`, into this file
    #[arg(long, value_name = "FILE")]
    schedules: Option<PathBuf>,

    /// Print the operations of a rank in a step, in words, in place of memory and traffic
    #[arg(long, conflicts_with = "json")]
    program: bool,
}

/// Device that holds a rank's part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlanDevice {
    /// Host memory.
    Cpu,
    /// A GPU.
    Cuda,
}

impl PlanDevice {
    const fn sequences(self) -> Sequences {
        match self {
            Self::Cpu => Sequences::OfEachChannel,
            Self::Cuda => Sequences::One,
        }
    }
}

/// A planned model, with its memory and traffic.
#[derive(Debug)]
struct Planned {
    name: String,
    optimizer: PlannedOptimizer,
    plan: Plan,
    memory: Vec<MemoryPlace>,
    world: StepTraffic,
}

/// Plans a model, draws it if requested, and prints memory and traffic.
pub(crate) fn run(options: &PlanArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    options.choices.check(options.device)?;
    let described = Model::file(&options.choices.model);
    let inputs = [&*described];
    let svg = output::check(options.svg.as_ref(), &inputs)?;
    let schedules = output::check(options.schedules.as_ref(), &inputs)?;
    if let (Some(svg), Some(schedules)) = (&svg, &schedules) {
        schedules.differs_from(svg).map_err(cannot_write)?;
    }
    if options.json {
        output::check_beside_json(&[&svg, &schedules])?;
    }
    let planned = planned(options)?;
    if let Some(file) = &svg {
        let picture = picture::of(&planned.name, &planned.plan)?;
        file.write_all(picture).map_err(cannot_write)?;
    }
    if let Some(file) = &schedules {
        let schedules = schedules_of(&planned.plan, options)?.to_json();
        file.write_all(schedules).map_err(cannot_write)?;
    }
    if options.program {
        print(program(&planned.plan, options))?;
    } else if options.json {
        print_json(&in_json(&planned))?;
    } else {
        print(report::text(&planned))?;
    }
    Ok(CommandOutcome::Well)
}

fn planned(options: &PlanArgs) -> Result<Planned, String> {
    let PlanArgs { choices, device, .. } = options;
    let plan = choices.plan(&choices.model(*device)?)?;
    let memory = match device {
        PlanDevice::Cpu => MemoryPlace::on_host(&plan),
        PlanDevice::Cuda => MemoryPlace::on_device(&plan, choices.offload),
    };
    let world = StepTraffic::of(&plan, choices.microbatches);
    let name = choices.model.clone();
    let optimizer = choices.optimizer;
    Ok(Planned { name, optimizer, plan, memory, world })
}

/// Returns the whole plan, with bytes and elements as exact numbers.
fn in_json(planned: &Planned) -> Value {
    let Planned { name, optimizer, plan, memory, world } = planned;
    let options = plan.options();
    let places = memory.iter().map(|place| (place.name.to_owned(), place_json(place)));
    json!({
        "model": name,
        "mesh": [plan.mesh().replicate_size(), plan.mesh().shard_size()],
        "param_dtype": options.param_dtype.name(),
        "reduce_dtype": options.reduce_dtype.name(),
        "accumulation": options.accumulation.name(),
        "microbatches": world.microbatches,
        "prefetch": options.prefetch,
        "optimizer": optimizer.name(),
        "state_over": options.state.name(),
        "parameters": plan.spec().numel().get(),
        "fingerprint": format!("{:016x}", plan.fingerprint()),
        "units": plan.spec().unit_ids().map(|unit| unit_json(planned, unit)).collect::<Vec<_>>(),
        "memory": { "places": places.collect::<Map<_, _>>() },
        "traffic": {
            "worst_rank": world.busiest.get(),
            "ranks_as_busy": world.as_busy,
            "rank": flows_json(world, |flows| flows[0]),
            "all_ranks": flows_json(world, |flows| flows[1]),
        },
    })
}

fn unit_json(planned: &Planned, unit: UnitId) -> Value {
    let spec = &planned.plan.spec()[unit];
    let layout = planned.plan.layout(unit);
    json!({
        "name": spec.name,
        "parameters": spec.params.len(),
        "elements": spec.numel().get(),
        "trainable": spec.trainable_numel().get(),
        "shard": layout.shard_len(),
        "padding": layout.padding().get(),
        "keep": spec.after_forward == AfterForward::Keep,
        "compute_dtype": planned.plan.compute_dtype(unit).name(),
    })
}

fn place_json(place: &MemoryPlace) -> Value {
    let mut peaks = Map::new();
    for category in place.categories() {
        let key = match category.name {
            "full" => format!("full_{}", category.when),
            name => name.to_owned(),
        };
        peaks.insert(key, category.bytes.get().into());
    }
    peaks.insert("full".to_owned(), place.peaks.full.get().into());
    peaks.insert("total".to_owned(), place.peaks.total().get().into());
    Value::Object(peaks)
}

/// Returns one of the two flows of each collective.
fn flows_json(world: &StepTraffic, of: fn([Flow; 2]) -> Flow) -> Value {
    let flow = |flow: Flow| json!({ "calls": flow.calls, "bytes": flow.bytes.get() });
    let each = world.flows().into_iter().map(|(name, both)| (name.to_owned(), flow(of(both))));
    Value::Object(each.collect())
}

/// Microbatches that differ: the first, those in the middle, and the last.
const DIFFERENT: u64 = 3;

const LEGEND: &str = "\
g1 gathers unit 1 for the forward, g1' for the backward; u1 hands it to the program, d1 drops it; \
l1 accumulates its gradients; r1 reduce-scatters them; a1 all-reduces their sums, or c1 \
reduce-scatters them over the replicas; f1 adds these to the partial; h1 gathers updated slices; \
(g1) waits for the gather; <headers> exchanges records";

/// Returns the first step of a model whose program uses the units as they are declared.
fn program(plan: &Plan, options: &PlanArgs) -> String {
    let rules = Rules {
        sequences: options.device.sequences(),
        order: UnitOrder::Error,
        ..Rules::default()
    };
    let count = options.choices.microbatches;
    let written = usize::try_from(count.min(DIFFERENT)).expect("at most three");
    let step = DryRun::of(&Arc::new(plan.clone()), rules, Some(written), written);
    let mut lines = vec![line("opening", &step.opening)];
    for (index, outputs) in step.microbatches.iter().enumerate() {
        let part = match index as u64 {
            0 if count > 1 => "microbatch 0".to_owned(),
            1 if count > DIFFERENT => format!("microbatches 1 to {}", count - 2),
            _ => format!("microbatch {}", count - 1 - (written - 1 - index) as u64),
        };
        lines.push(line(&part, outputs));
    }
    lines.push(line("finish", &step.finish));
    if !step.update.is_empty() {
        lines.push(line("update", &step.update));
    }
    let units = plan.spec().units().iter().enumerate();
    let units: Vec<String> = units.map(|(index, unit)| format!("{index} {}", unit.name)).collect();
    format!("{}\n\nunits: {}\n{LEGEND}", lines.join("\n"), units.join(", "))
}

fn line(part: &str, outputs: &[Output]) -> String {
    let words: Vec<String> = outputs.iter().map(ToString::to_string).collect();
    format!("{part}: {}", words.join(" "))
}

/// Returns the schedules of a plan, whose number of microbatches is given.
fn schedules_of(plan: &Plan, options: &PlanArgs) -> Result<Schedules, hsdp_simulator::Error> {
    let placement = match options.device {
        PlanDevice::Cpu => ModelPlacement::Host,
        PlanDevice::Cuda => ModelPlacement::Device,
    };
    let microbatches = Microbatches::Given(options.choices.microbatches);
    Order::of(&Arc::new(plan.clone()), microbatches, placement)
        .schedules(None, options.device.sequences())
}
