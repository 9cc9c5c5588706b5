//! The steps that are measured, and the clocks.

use std::time::Duration;

use hsdp::{Error, Mesh, ModelOptions, World};
use hsdp_benches::steps::Steps;
use hsdp_benches::stopwatch::Stopwatch;
use hsdp_train::Failure;
use rustix::time::{ClockId, clock_gettime};

use crate::options::Options;

/// All ranks shard one replica.
///
/// # Errors
/// [`Failure::Input`]
pub(crate) fn mesh(ranks: usize) -> Result<Mesh, Failure> {
    Mesh::new(1, ranks).map_err(Failure::input)
}

/// Runs a step that is not measured, then `meet`, then the measured steps.
pub(crate) fn run(
    world: World,
    options: &Options,
    model: ModelOptions,
    meet: impl FnOnce() -> Result<(), Error>,
    mut watch: Stopwatch,
) -> Result<Stopwatch, Error> {
    let mut steps = Steps::new(world, options.size(), model)?;
    steps.step(&mut Stopwatch::still())?;
    meet()?;
    watch.restart();
    (0..options.repeat).try_for_each(|_| steps.step(&mut watch))?;
    Ok(watch)
}

/// The gathers and reductions of the measured steps, on one rank.
pub(crate) fn operations(options: &Options) -> u32 {
    let size = options.size();
    3 * size.units * size.microbatches * options.repeat
}

/// The CPU time of all threads of this process.
pub(crate) fn of_process() -> Duration {
    of(ClockId::ProcessCPUTime)
}

/// The CPU time of this thread.
#[cfg(feature = "nccl")]
pub(crate) fn of_thread() -> Duration {
    of(ClockId::ThreadCPUTime)
}

fn of(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    let part = |number: i64| u64::try_from(number).expect("a clock does not go backwards");
    Duration::new(part(time.tv_sec), u32::try_from(time.tv_nsec).expect("less than a second"))
}
