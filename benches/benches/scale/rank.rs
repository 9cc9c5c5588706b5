//! A process that was started as one rank: rank 0 prints what it has measured.

use std::time::{Duration, Instant};

use hsdp::{Error, ModelOptions, Offload, Placement, World};
use hsdp_benches::stopwatch::{StepPart, Stopwatch};
use hsdp_benches::times::median;
use hsdp_comm::control::Job;
use hsdp_comm::{Channel, Stage, Tag, WorldOptions};
use hsdp_kernels::cuda::Device;
use hsdp_train::{Failure, print};

use crate::options::{Options, Subject};
use crate::steps::{mesh, of_thread, operations, run as run_steps};

/// The time in which all processes come, on a machine with few cores.
const DEADLINE: Duration = Duration::from_secs(300);

/// Words of 8 bytes that each member contributes to an exchange.
const WORDS: usize = 8;

/// The device: on the emulated driver each process has one of its own.
const ORDINAL: usize = 0;

pub(crate) fn run(subject: Subject, options: &Options) -> Result<(), Failure> {
    let job = Job::from_env(DEADLINE).map_err(Failure::work)?;
    let of_world = WorldOptions { deadline: DEADLINE, ..WorldOptions::default() };
    let measure = |world: World| match subject {
        Subject::Operations => operation(world, options),
        Subject::Exchanges => exchange(&world, options),
    };
    let ran = job.launch(job.size(), of_world, measure).map_err(Failure::work)?;
    let Some(ran) = ran else { return Ok(()) };
    let seconds = ran?;
    if job.rank().index() == 0 {
        print(seconds)?;
    }
    Ok(())
}

/// The CPU time of this rank's own thread in an operation.
fn operation(world: World, options: &Options) -> Result<f64, Failure> {
    let device = Device::new(ORDINAL).map_err(Failure::work)?;
    world.connect_nccl(&device).map_err(Failure::work)?;
    let placement = Placement::Cuda { ordinal: ORDINAL, offload: Offload::None };
    let model = ModelOptions { placement, ..ModelOptions::on(mesh(world.size())?) };
    let watch = Stopwatch::of_clock(of_thread);
    let watch = run_steps(world, options, model, || Ok(()), watch).map_err(Failure::work)?;
    let parts = [StepPart::Forward, StepPart::Backward, StepPart::Reduce];
    let spent: Duration = parts.into_iter().map(|part| watch.time(part)).sum();
    Ok(spent.as_secs_f64() / f64::from(operations(options)))
}

/// The time of an exchange of 64 bytes of all members.
fn exchange(world: &World, options: &Options) -> Result<f64, Failure> {
    let group = world.world_group(Channel::Control);
    let exchange = || {
        let began = Instant::now();
        let all = group.all_gather(Tag::new(Stage::Setup), vec![0_u64; WORDS])?.wait()?;
        debug_assert_eq!(all.len(), WORDS * world.size());
        Ok::<_, Error>(began.elapsed())
    };
    exchange().map_err(Failure::work)?;
    let times: Result<Vec<_>, _> = (0..options.repeat).map(|_| exchange()).collect();
    Ok(median(&times.map_err(Failure::work)?).as_secs_f64())
}
