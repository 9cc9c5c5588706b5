//! A step of 256 ranks beside one of 64, each rank with the same bytes: the time beyond four times
//! as long is the cost of ranks to each other.

use std::time::{Duration, Instant};

use hsdp::{Error, Mesh, ModelOptions, Plan, Rank, World};
use hsdp_benches::steps::{GradientCount, Steps, StepsSize};
use hsdp_benches::stopwatch::Stopwatch;
use hsdp_benches::times::{least, median};
use hsdp_comm::{Channel, Tag, WorldOptions, launch};
use hsdp_sharding::PlanOptions;
use hsdp_train::memory::Limit;
use hsdp_train::{Failure, print};

use crate::options::Options;

/// How many times as long a step of 256 ranks may take as one of 64.
const GOAL: f64 = 5.0;

/// Meshes of 64 ranks and of 256: with both axes longer, with longer replicate groups, and with
/// longer shard groups.
const PAIRS: [[[usize; 2]; 2]; 3] = [[[8, 8], [16, 16]], [[8, 8], [32, 8]], [[1, 64], [1, 256]]];

const UNITS: u32 = 4;
const MICROBATCHES: u32 = 2;
/// Of one world: its first step touches pages, and is not measured.
const STEPS: u32 = 3;

pub(crate) fn measure(options: &Options) -> Result<(), Failure> {
    let numel = options.numel;
    let gradients = GradientCount::OneForAll;
    let size = StepsSize { units: UNITS, numel, microbatches: MICROBATCHES, gradients };
    for [_, large] in PAIRS {
        let model = ModelOptions::on(mesh(large)?);
        size.need(&model)?.check(Limit::of_process())?;
    }
    print(format_args!(
        "{UNITS} units of {numel} parameters, {MICROBATCHES} microbatches, threads as ranks"
    ))?;
    for pair in PAIRS {
        let mut times = [Vec::new(), Vec::new()];
        let meshes = [mesh(pair[0])?, mesh(pair[1])?];
        for _ in 0..options.rounds {
            for (times, mesh) in times.iter_mut().zip(meshes) {
                times.extend(steps_of_a_world(mesh, size)?);
            }
        }
        for (times, mesh) in times.iter().zip(meshes) {
            let [least, median] = [least, median].map(|of| of(times).as_secs_f64() * 1e3);
            print(format_args!(
                "  mesh {:<6} {least:>8.1} ms (least) {median:>8.1} ms (median) a step, {} bytes received a rank",
                mesh.to_string(),
                received(mesh, size)?
            ))?;
        }
        let [least, median] =
            [least, median].map(|of| of(&times[1]).as_secs_f64() / of(&times[0]).as_secs_f64());
        print(format_args!(
            "  ratio {least:.2} (least), {median:.2} (median); the goal is {GOAL}"
        ))?;
    }
    Ok(())
}

fn mesh([replicate, shard]: [usize; 2]) -> Result<Mesh, Failure> {
    Ok(Mesh::new(replicate, shard)?)
}

/// What rank 0 receives in a step, by the plan.
fn received(mesh: Mesh, size: StepsSize) -> Result<u64, Failure> {
    let plan = Plan::new(size.spec(), mesh, PlanOptions::default())?;
    Ok(plan.traffic(Rank::new(0), size.microbatches.into()).total().bytes.get())
}

/// What rank 0 measures of a world's steps, from one meeting of all ranks to the next.
fn steps_of_a_world(mesh: Mesh, size: StepsSize) -> Result<Vec<Duration>, Failure> {
    let ran = launch(mesh.world_size(), WorldOptions::default(), |world| {
        run(Steps::new(world.clone(), size, ModelOptions::on(mesh))?, &world)
    });
    let mut of_rank_0 = Vec::new();
    for (rank, outcome) in ran.into_iter().enumerate() {
        let times = outcome?;
        if rank == 0 {
            of_rank_0 = times;
        }
    }
    Ok(of_rank_0)
}

fn run(mut steps: Steps, world: &World) -> Result<Vec<Duration>, Error> {
    let group = world.world_group(Channel::User);
    let meet = || Ok::<_, Error>(group.barrier(Tag::default())?.wait()?);
    steps.step(&mut Stopwatch::still())?;
    let mut times = Vec::new();
    for _ in 0..STEPS {
        meet()?;
        let started = Instant::now();
        steps.step(&mut Stopwatch::still())?;
        meet()?;
        times.push(started.elapsed());
    }
    Ok(times)
}
