//! The accumulation benchmark: the time of a step's data movement, without the arithmetic of a model.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench accumulation -- --mesh 2x2 --units 8 --numel 2000000 --microbatches 8
//! ```
//!
//! A step has some microbatches. Each unshards every unit for the forward, and again for the backward, last unit first, and
//! reduces a gradient that exists already; the deferred all-reduce and the agreement end the step. The optimizer is not
//! included. `benches/peers/fsdp2.py` does the same work with PyTorch FSDP2.
//!
//! By turns with the runtime, on the same threads, a bare loop makes the same passes over as many bytes and nothing else: it
//! has no plan and no descriptors, and waits only at the end. docs/performance.md has the formula of the bytes.
//!
//! In reading order: `options`, `ranks`, `bare` (the loop), `bytes`, `report`; the step of hsdp is in the module `steps` of this crate.

mod bare;
mod bytes;
mod options;
mod ranks;
mod report;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use hsdp::World;
use hsdp_benches::program;
use hsdp_benches::steps::Steps;
use hsdp_benches::stopwatch::Stopwatch;
use hsdp_comm::{Channel, Tag};

use crate::bare::Bare;
use crate::options::Options;
use crate::report::Times;

fn main() -> ExitCode {
    program::run(|options: Options| {
        options.check()?;
        match measure(&options)? {
            Some(times) => Ok(report::show(&options, &times)?),
            None => Ok(()),
        }
    })
}

/// Runs both in turn on one thread a rank; the times of rank 0, from one meeting of all ranks to the next, if it is a rank of
/// this process.
fn measure(options: &Options) -> Result<Option<Times>, String> {
    let bare = Bare::serves(options).then(|| Bare::new(options));
    let ran = ranks::launch(options, |world| {
        let mut steps = Steps::new(world.clone(), options.size(), options.of_model())?;
        let mut times = Times::default();
        for round in 0..=options.repeat {
            let by_runtime = timed(&world, || steps.step(&mut Stopwatch::still()))?;
            let by_loop = timed(&world, || {
                bare.iter().for_each(|bare| bare.step(world.rank().index()));
                Ok(())
            })?;
            // The first round touches pages.
            if round > 0 {
                times.push(by_runtime, by_loop);
            }
        }
        Ok::<_, hsdp::Error>((world.rank(), times))
    })?;
    let of_first = ran.into_iter().next().ok_or("no ranks")?;
    bare.as_ref().map_or(Ok(()), Bare::check)?;
    let of_first = of_first.map_err(|failure| failure.to_string())?;
    let (rank, times) = of_first.map_err(|error| error.to_string())?;
    Ok((rank.index() == 0).then_some(times))
}

fn timed(
    world: &World,
    work: impl FnOnce() -> Result<(), hsdp::Error>,
) -> Result<Duration, hsdp::Error> {
    let meet = || world.world_group(Channel::User).barrier(Tag::default())?.wait();
    meet()?;
    let started = Instant::now();
    work()?;
    meet()?;
    Ok(started.elapsed())
}
