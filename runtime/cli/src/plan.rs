//! `hsdp plan`: computes the memory and the traffic of a model's training step, before anything
//! runs.

pub(crate) mod choices;
mod json;
mod memory;
pub(crate) mod optimizer;
mod picture;
mod program;
mod report;
mod schedules;
mod traffic;

use std::error::Error;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hsdp_sharding::Plan;
use hsdp_train::{print, print_json};

use self::choices::Choices;
use self::memory::Memory;
use self::optimizer::Optimizer;
use self::traffic::World;
use crate::model::Model;
use crate::outcome::Outcome;
use crate::output::{self, cannot_write};

/// Options of `hsdp plan`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    choices: Choices,

    /// Device that holds the model
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,

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
pub(crate) enum Device {
    /// Host memory.
    Cpu,
    /// A GPU.
    Cuda,
}

/// A planned model, with its memory and traffic.
#[derive(Debug)]
struct Planned {
    name: String,
    optimizer: Optimizer,
    plan: Plan,
    memory: Memory,
    world: World,
}

/// Plans a model, draws it if requested, and prints memory and traffic.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
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
        let schedules = schedules::of(&planned.plan, options)?.to_json();
        file.write_all(schedules).map_err(cannot_write)?;
    }
    if options.program {
        print(program::text(&planned.plan, options))?;
    } else if options.json {
        print_json(&json::of(&planned))?;
    } else {
        print(report::text(&planned))?;
    }
    Ok(Outcome::Well)
}

fn planned(options: &Options) -> Result<Planned, String> {
    let Options { choices, device, .. } = options;
    let plan = choices.plan(&choices.model(*device)?)?;
    let memory = match device {
        Device::Cpu => Memory::on_host(&plan),
        Device::Cuda => Memory::on_device(&plan, choices.offload),
    };
    let world = World::of(&plan, choices.microbatches);
    let (name, optimizer) = (choices.model.clone(), choices.optimizer);
    Ok(Planned { name, optimizer, plan, memory, world })
}
