//! The accumulation benchmark: the time of a step's data movement, without the arithmetic of a
//! model.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench accumulation -- --mesh 2x2 --units 8 --numel 2000000 --microbatches 8
//! ```
//!
//! A step has some microbatches. Each unshards every unit for the forward, and again for the
//! backward, last unit first, and reduces a gradient that exists already; the deferred all-reduce
//! and the agreement end the step. The optimizer is not included. `benches/peers/fsdp2.py` does the
//! same work with PyTorch FSDP2.
//!
//! By turns with the runtime, on the same threads, a bare loop makes the same passes over as many
//! bytes and nothing else: it has no plan and no descriptors, and waits only at the end.
//! docs/performance.md has the formula of the bytes. With `--comm nccl` all lies on a CUDA device,
//! and the loop makes the same calls of NCCL.
//!
//! In reading order: `options`, `ranks`, `bare` (the loop), `nccl` (that on a device), `bytes`,
//! `report`; the step of hsdp is in the module `steps` of this crate.

mod bare;
mod bytes;
#[cfg_attr(not(feature = "nccl"), path = "absent.rs")]
mod nccl;
mod options;
mod ranks;
mod report;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use hsdp::{Rank, World};
use hsdp_benches::program;
use hsdp_benches::steps::Steps;
use hsdp_benches::stopwatch::Stopwatch;
use hsdp_comm::{Channel, Tag};
use hsdp_train::Failure;

use crate::bare::Bare;
use crate::options::Options;
use crate::report::Times;

fn main() -> ExitCode {
    program::run(|options: Options| {
        options.check()?;
        match measure(&options).map_err(Failure::Work)? {
            Some(times) => Ok(report::show(&options, &times)?),
            None => Ok(()),
        }
    })
}

/// Runs both in turn on one thread a rank; the times of rank 0, from one meeting of all ranks to
/// the next, if it is a rank of this process.
fn measure(options: &Options) -> Result<Option<Times>, String> {
    let bare = Bare::of(options)?;
    let ran = ranks::launch(options, |world| rank(options, world, bare.as_ref()))?;
    let mut ran = ran.into_iter();
    Ok(ran.find(|(rank, _)| rank.index() == 0).map(|(_, times)| times))
}

fn rank(options: &Options, world: &World, bare: Option<&Bare>) -> Result<(Rank, Times), String> {
    let said = |error: hsdp::Error| error.to_string();
    ranks::connect(options, world)?;
    let steps = Steps::new(world.clone(), options.size(), options.of_model());
    let mut steps = steps.map_err(said)?;
    let mut own = bare.map(|bare| bare.own(options, world.rank())).transpose()?;
    let mut times = Times::default();
    for round in 0..=options.repeat {
        let by_runtime = timed(world, || steps.step(&mut Stopwatch::still()).map_err(said))?;
        let by_loop = timed(world, || own.as_mut().map_or(Ok(()), |own| own.step()))?;
        // The first round touches pages.
        if round > 0 {
            times.push(by_runtime, by_loop);
        }
    }
    own.map_or(Ok(()), |own| bare::check(&*own, options))?;
    Ok((world.rank(), times))
}

fn timed(world: &World, work: impl FnOnce() -> Result<(), String>) -> Result<Duration, String> {
    let meet = || world.world_group(Channel::User).barrier(Tag::default())?.wait();
    meet().map_err(|error| error.to_string())?;
    let started = Instant::now();
    work()?;
    meet().map_err(|error| error.to_string())?;
    Ok(started.elapsed())
}
