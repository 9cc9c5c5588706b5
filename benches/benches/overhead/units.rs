//! The cost of a unit of one element in a microbatch.

use std::time::{Duration, Instant};

use hsdp::{Error, Mesh, ModelOptions, World};
use hsdp_benches::steps::{GradientCount, Steps, StepsSize};
use hsdp_benches::stopwatch::{Per, StepPart, Stopwatch};
use hsdp_benches::times::{least, median};
use hsdp_comm::{Channel, Tag, WorldOptions, launch};
use hsdp_train::stdout::PrintError;
use hsdp_train::{Failure, print};

use crate::options::Options;

/// Two unshards and a reduction, in microseconds, on as many ranks as there are cores or fewer.
const GOAL: f64 = 5.0;

/// What rank 0 measured: the times of whole steps, and the parts of others.
struct Measured {
    steps: Vec<Duration>,
    parts: Vec<Stopwatch>,
}

pub(crate) fn measure(options: &Options) -> Result<(), Failure> {
    let Options { units, microbatches, .. } = *options;
    print(format_args!(
        "units of one element, {units} of them, {microbatches} microbatches a step; rank 0, {} steps",
        options.repeat
    ))?;
    for ranks in [1, 2] {
        let mesh = Mesh::new(1, ranks)?;
        let size = StepsSize { units, numel: 1, microbatches, gradients: GradientCount::OneForAll };
        let measured = launch(ranks, WorldOptions::default(), |world| {
            run(Steps::new(world.clone(), size, ModelOptions::on(mesh))?, &world, options)
        });
        let of_rank_0 = measured.into_iter().next().ok_or_else(|| Failure::work("no ranks"))?;
        show(ranks, size, &of_rank_0?)?;
    }
    Ok(())
}

fn run(mut steps: Steps, world: &World, options: &Options) -> Result<Measured, Error> {
    let group = world.world_group(Channel::User);
    let mut measured = Measured { steps: Vec::new(), parts: Vec::new() };
    // The first step allocates.
    steps.step(&mut Stopwatch::still())?;
    for _ in 0..options.repeat {
        group.barrier(Tag::default())?.wait()?;
        let started = Instant::now();
        steps.step(&mut Stopwatch::still())?;
        measured.steps.push(started.elapsed());
        let mut watch = Stopwatch::running();
        steps.step(&mut watch)?;
        measured.parts.push(watch);
    }
    Ok(measured)
}

fn show(ranks: usize, size: StepsSize, measured: &Measured) -> Result<(), PrintError> {
    let each = size.units * size.microbatches;
    let [least_us, median_us] =
        [least, median].map(|of| of(&measured.steps).as_secs_f64() * 1e6 / f64::from(each));
    print(format_args!(
        "  {ranks} ranks: {least_us:.2} us (least), {median_us:.2} us (median) a unit and microbatch; the goal is {GOAL} us"
    ))?;
    for part in StepPart::ALL {
        let times: Vec<_> = measured.parts.iter().map(|watch| watch.time(part)).collect();
        let (name, per) = part.name();
        let (count, per) = match per {
            Per::Step => (1, "a step"),
            Per::Microbatch => (size.microbatches, "a microbatch"),
            Per::Unit => (each, "a unit and microbatch"),
        };
        let [least, median] =
            [least, median].map(|of| of(&times).as_secs_f64() * 1e6 / f64::from(count));
        print(format_args!(
            "    {name:<20} {least:>8.2} us (least) {median:>8.2} us (median) {per}"
        ))?;
    }
    Ok(())
}
