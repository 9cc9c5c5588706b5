//! `hsdp plan`: the memory and the traffic of a model's training step, before anything runs.

mod bundled;
mod file;
mod json;
mod memory;
mod optimizer;
mod picture;
mod report;
mod traffic;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use hsdp_program::print;
use hsdp_sharding::{Accumulation, DType, Mesh, ModelSpec, Offload, Plan, PlanOptions};

use self::memory::Memory;
use self::optimizer::Optimizer;
use self::traffic::World;
use crate::outcome::Outcome;

/// The most ranks of a mesh: the traffic is computed for each replica.
const MAX_RANKS: usize = 1 << 20;

/// The most microbatches of a step, so that byte counts fit 64 bits.
const MAX_MICROBATCHES: u64 = 1 << 20;

/// The options of `hsdp plan`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// File that describes a model (PLAN.md), of at most 16 MiB, or gpt2-small, llama3-8b or llama3-70b
    #[arg(value_name = "MODEL")]
    model: String,

    /// Replicas x shards, such as 2x64; at most 1048576 ranks
    #[arg(long, value_name = "RxS")]
    mesh: Mesh,

    /// Dtype of gathered parameters, in which the model computes: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = DType::of_training)]
    param_dtype: DType,

    /// Dtype of gradients on the wire: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = DType::of_training)]
    reduce_dtype: DType,

    /// Collectives on gradients in each microbatch: reduce-scatter, every (also all-reduce) or local (none before the last)
    #[arg(long, value_name = "MODE", default_value = "reduce-scatter")]
    accumulation: Accumulation,

    /// Microbatches of a step, on each rank; at most 1048576
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=MAX_MICROBATCHES))]
    microbatches: u64,

    /// Units that are gathered ahead
    #[arg(long, value_name = "UNITS", default_value_t = 1)]
    prefetch: usize,

    /// Optimizer whose state takes memory, and whose update may exchange matrices
    #[arg(long, value_name = "OPTIMIZER", default_value = "adamw")]
    optimizer: Optimizer,

    /// Device that holds the model
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,

    /// Part of a model on a device that is kept in host memory: none, optimizer (its state) or all (also shards)
    #[arg(long, value_name = "PART", default_value = "none")]
    offload: Offload,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Also draw the shards of each unit, and the ranks that own them, as SVG into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The device that holds a rank's part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
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

/// Plans a model, draws it if asked to, and prints memory and traffic.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    check(options)?;
    let (name, spec) = model(&options.model)?;
    let planned = planned(name, spec, options)?;
    if let Some(file) = &options.svg {
        let picture = picture::of(&planned.name, &planned.plan)?;
        fs::write(file, picture).map_err(|error| cannot_write(file, &error))?;
    }
    if options.json {
        print(json::of(&planned))?;
    } else {
        print(report::text(&planned))?;
    }
    Ok(Outcome::Well)
}

fn check(options: &Options) -> Result<(), String> {
    if options.device == Device::Cpu && options.offload != Offload::None {
        let what = options.offload;
        return Err(format!(
            "--offload {what} needs --device cuda: there is nothing to offload from the host"
        ));
    }
    let is_on_device = options.device == Device::Cuda && options.offload == Offload::None;
    if is_on_device && !options.optimizer.updates_on_device() {
        let optimizer = options.optimizer.name();
        return Err(format!(
            "--optimizer {optimizer} does not update a model on a device: add --offload optimizer"
        ));
    }
    let (mesh, ranks) = (options.mesh, options.mesh.world_size());
    if ranks > MAX_RANKS {
        return Err(format!("mesh {mesh} has {ranks} ranks; at most {MAX_RANKS} are planned"));
    }
    Ok(())
}

fn planned(name: String, spec: ModelSpec, options: &Options) -> Result<Planned, String> {
    let choices = PlanOptions {
        param_dtype: options.param_dtype,
        reduce_dtype: options.reduce_dtype,
        accumulation: options.accumulation,
        prefetch: options.prefetch,
        ..PlanOptions::default()
    };
    let optimizer = options.optimizer;
    let plan = Plan::new(optimizer.applied_to(&spec), options.mesh, choices)
        .map_err(|wrong| format!("{name}: {wrong}"))?;
    check_bytes(&plan, options.microbatches)?;
    let memory = match options.device {
        Device::Cpu => Memory::on_host(&plan),
        Device::Cuda => Memory::on_device(&plan, options.offload),
    };
    let world = World::of(&plan, options.microbatches);
    Ok(Planned { name, optimizer, plan, memory, world })
}

/// Checks that byte counts fit 64 bits. In each microbatch a rank receives at most two gathers, a reduction and the two halves of
/// an all-reduce, of at most 4 bytes per element. In the update it receives matrices once there and once back; or the two halves of an
/// all-reduce of one f64 for each parameter, row and column, and of one for each parameter: at most four per element.
fn check_bytes(plan: &Plan, microbatches: u64) -> Result<(), String> {
    let elements: u64 = plan.layouts().iter().map(|layout| layout.full_len() as u64).sum();
    let ranks = plan.mesh().world_size();
    let of_update = 2 + 2 * (3 + 1) * 2;
    let times = 5 * u128::from(microbatches) + of_update;
    let bytes = u128::from(elements) * 4 * times * ranks as u128;
    if u64::try_from(bytes).is_ok() {
        return Ok(());
    }
    Err(format!(
        "{elements} elements, {microbatches} microbatches and {ranks} ranks: the bytes of a step do not fit 64 bits"
    ))
}

/// The bundled model of this name, or the model in the file of this name.
fn model(name: &str) -> Result<(String, ModelSpec), String> {
    if let Some(spec) = bundled::find(name) {
        return Ok((name.to_owned(), spec));
    }
    let spec = file::read(Path::new(name))?;
    Ok((name.to_owned(), spec))
}

fn cannot_write(file: &Path, error: &std::io::Error) -> String {
    format!("cannot write {}: {error}", file.display())
}
