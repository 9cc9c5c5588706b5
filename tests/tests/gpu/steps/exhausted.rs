//! A rank whose device has no memory left: it and all others end the step, and go on with the next
//! when there is some.
//!
//! Who takes all memory takes it from all tests. So these run in a process of their own, which
//! takes no more of the device than a little.

use std::collections::BTreeMap;
use std::sync::Barrier;

use hsdp::{
    Accumulation, Ema, Error, LossSum, ModelOptions, ModelSpec, Optimizer, Param, Pass, Placement,
    Sgd, SgdOptions, ShardedModel, StepOptions, Unit, UnitGradients, World,
};
use hsdp_kernels::cuda::DeviceBuffer;
use hsdp_sharding::DType;
use hsdp_tests::support::models::unit;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, on_ranks};

use super::super::apart::is_apart;
use super::super::device;
use super::{DEVICE, placed};

/// What that process may take.
const MEMORY: usize = 64 << 20;

/// They need no padding.
const ELEMENTS: usize = 60_032;

/// All memory of the device.
fn all_memory() -> Vec<DeviceBuffer> {
    let mut held = Vec::new();
    let sizes = std::iter::successors(Some(8_usize << 20), |size| Some(size / 2));
    for bytes in sizes.take_while(|size| *size >= 512) {
        let take = || DeviceBuffer::new(&device(), DType::F32, bytes / 4, "all there is");
        held.extend(std::iter::from_fn(|| take().ok()));
    }
    held
}

/// Before what rank 1 finds no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    Gather,
    Reduce,
}

/// A rank's part in a step in which rank 1 finds no memory: rank 0 waits meanwhile.
struct Rank<'a> {
    meeting: &'a Barrier,
    before: Before,
    is_short: bool,
}

impl Rank<'_> {
    /// Does something, or has the other do it first without memory.
    fn act(&self, what: Before, act: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        if what != self.before {
            return act();
        }
        self.meeting.wait();
        if !self.is_short {
            self.meeting.wait();
            return act();
        }
        let held = all_memory();
        let told = act();
        drop(held);
        told
    }

    /// A step of one microbatch, which nobody finishes.
    fn step(&self, model: &mut ShardedModel) -> String {
        let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        let mut run = || {
            let mut pass = step.microbatch()?;
            self.act(Before::Gather, || pass.unshard(unit(0)).map(drop))?;
            let _ = pass.loss(LossSum::new(0.0, 1))?;
            drop(pass.unshard(unit(0))?);
            self.act(Before::Reduce, || {
                pass.reduce(unit(0), UnitGradients::of([vec![0.5_f32; ELEMENTS]]))
            })?;
            pass.finish()
        };
        let ran: Result<(), Error> = run();
        let told = ran.and_then(|()| step.finish().map(drop)).expect_err("rank 1 has no memory");
        if self.is_short {
            self.meeting.wait();
        }
        assert!(!told.is_fatal(), "{told}");
        told.to_string()
    }
}

fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    let spec = ModelSpec::new().unit(Unit::new("unit").param(Param::new("w", [ELEMENTS])));
    springs::model_of(world, &spec, options)
}

/// A step in which there is memory.
fn step(model: &mut ShardedModel) -> Result<BTreeMap<String, Vec<f32>>, Error> {
    let mut sgd = Sgd::new(model, SgdOptions::default());
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let pass = step.microbatch()?;
    reduce(pass, 0.25)?;
    let gradients = step.finish()?;
    sgd.step(model, gradients)?;
    model.full_parameters()
}

fn reduce(mut pass: Pass<'_>, slope: f32) -> Result<(), Error> {
    let _ = pass.loss(LossSum::new(0.0, 1))?;
    pass.reduce(unit(0), UnitGradients::of([vec![slope; ELEMENTS]]))?;
    pass.finish()
}

/// Returns the error of rank 1, which finds no memory before something. Checks that rank 0 gets the
/// same error, and that the next step takes place.
fn told(before: Before, accumulation: Accumulation) -> String {
    let options = ModelOptions { accumulation, ..placed(DEVICE, [1, 2]) };
    let meeting = Barrier::new(2);
    let (told, parameters): (Vec<_>, Vec<_>) = on_ranks(2, |world| {
        let is_short = world.rank().index() == 1;
        let rank = Rank { meeting: &meeting, before, is_short };
        let mut model = model(world, &options)?;
        let told = rank.step(&mut model);
        Ok((told, step(&mut model)?))
    })
    .into_iter()
    .unzip();
    let on_host = ModelOptions { placement: Placement::Host, ..options };
    let untouched = common(on_ranks(2, |world| step(&mut model(world, &on_host)?)));
    assert_eq!(common(parameters), untouched, "the failed step left no trace");
    assert_eq!(told[0], format!("step 0 aborted by rank 1: {}", told[1]));
    told[1].clone()
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_whose_device_has_no_memory_ends_the_step_for_all() {
    if !is_apart("steps::exhausted::a_rank_whose_device_has_no_memory_ends_the_step_for_all") {
        return;
    }
    device().limit_memory(MEMORY);
    let scattered = Accumulation::ReduceScatter;
    let local = Accumulation::Local;
    for (before, mode, operation, bytes, what) in [
        (Before::Gather, scattered, "gather", 4 * ELEMENTS, "a gathered unit"),
        (Before::Reduce, scattered, "reduction", 2 * ELEMENTS, "partials"),
        (Before::Reduce, local, "accumulation", 4 * ELEMENTS, "unsharded gradients"),
    ] {
        assert_eq!(
            told(before, mode),
            format!(
                "{operation} on rank 1, step 0: CUDA device 0 is out of memory: cannot allocate {bytes} bytes for \
                 {what}, 0 of {MEMORY} bytes are free"
            ),
        );
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_device_without_memory_for_averaged_parameters_names_call_and_step() {
    if !is_apart(
        "steps::exhausted::a_device_without_memory_for_averaged_parameters_names_call_and_step",
    ) {
        return;
    }
    device().limit_memory(MEMORY);
    let told = on_ranks(1, |world| {
        let mut model = model(world, &placed(DEVICE, [1, 1]))?;
        let ema = Ema::new(&model, 0.9)?;
        step(&mut model)?;
        let held = all_memory();
        let told = model.with_shards(&ema, |_| Ok::<_, Error>(())).expect_err("no memory");
        drop(held);
        model.with_shards(&ema, |_| Ok::<_, Error>(told.to_string()))
    });
    let expected = format!(
        "with_shards on rank 0, step 1: CUDA device 0 is out of memory: cannot allocate {} bytes for \
         parameters, 0 of {MEMORY} bytes are free",
        4 * ELEMENTS
    );
    assert_eq!(told, [expected]);
}
