//! A step of 256 ranks beside one of 64, each rank with the same bytes: how much more than four times as long it takes is
//! what ranks cost each other.

use std::time::{Duration, Instant};

use hsdp::{Error, Mesh, Plan, Rank, World};
use hsdp_comm::{Channel, Tag, WorldOptions, launch};
use hsdp_sharding::PlanOptions;

use crate::options::Options;
use crate::steps::{Size, Steps};
use crate::stopwatch::Stopwatch;
use crate::{least, median};

/// How many times as long a step of 256 ranks may take as one of 64.
const GOAL: f64 = 5.0;

/// Meshes of 64 ranks and of 256: with both axes longer, with longer replicate groups, and with longer shard groups.
const PAIRS: [[(usize, usize); 2]; 3] =
    [[(8, 8), (16, 16)], [(8, 8), (32, 8)], [(1, 64), (1, 256)]];

const UNITS: u32 = 4;
const MICROBATCHES: u32 = 2;
/// Of one world: its first step touches pages, and is not measured.
const STEPS: u32 = 3;

#[expect(clippy::print_stdout, reason = "a command-line program")]
pub(crate) fn measure(options: &Options) -> Result<(), String> {
    let numel = options.numel;
    println!("{UNITS} units of {numel} parameters, {MICROBATCHES} microbatches, threads as ranks");
    for pair in PAIRS {
        let mut times = [Vec::new(), Vec::new()];
        let sizes = [size(pair[0], numel)?, size(pair[1], numel)?];
        for _ in 0..options.rounds {
            for (times, size) in times.iter_mut().zip(sizes) {
                times.extend(steps_of_a_world(size)?);
            }
        }
        for (times, size) in times.iter().zip(sizes) {
            let [least, median] = [least, median].map(|of| of(times).as_secs_f64() * 1e3);
            println!(
                "  mesh {:<6} {least:>8.1} ms (least) {median:>8.1} ms (median) a step, {} bytes received a rank",
                size.mesh.to_string(),
                received(size)?
            );
        }
        let [least, median] =
            [least, median].map(|of| of(&times[1]).as_secs_f64() / of(&times[0]).as_secs_f64());
        println!("  ratio {least:.2} (least), {median:.2} (median); the goal is {GOAL}");
    }
    Ok(())
}

fn size((replicate, shard): (usize, usize), numel: u32) -> Result<Size, String> {
    let mesh = Mesh::new(replicate, shard).map_err(|error| error.to_string())?;
    Ok(Size { mesh, units: UNITS, numel, microbatches: MICROBATCHES })
}

/// What rank 0 receives in a step, by the plan.
fn received(size: Size) -> Result<u64, String> {
    let plan = Plan::new(size.spec(), size.mesh, PlanOptions::default());
    let plan = plan.map_err(|error| error.to_string())?;
    Ok(plan.traffic(Rank::new(0), size.microbatches.into()).total().bytes.get())
}

/// What rank 0 measures of a world's steps, from one meeting of all ranks to the next.
fn steps_of_a_world(size: Size) -> Result<Vec<Duration>, String> {
    let ran = launch(size.mesh.world_size(), WorldOptions::default(), |world| run(world, size));
    let mut of_rank_0 = Vec::new();
    for (rank, outcome) in ran.into_iter().enumerate() {
        let outcome = outcome.map_err(|failure| failure.to_string())?;
        let times = outcome.map_err(|error| error.to_string())?;
        if rank == 0 {
            of_rank_0 = times;
        }
    }
    Ok(of_rank_0)
}

fn run(world: World, size: Size) -> Result<Vec<Duration>, Error> {
    let group = world.world_group(Channel::User);
    let mut steps = Steps::new(world, size)?;
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
