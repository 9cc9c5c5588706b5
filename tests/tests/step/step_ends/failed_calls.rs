//! A call of a step fails or panics in the middle of its work, and the program goes on as if it had
//! not: the step does not finish.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hsdp::{
    Accumulation, Error, GradientValues, LossSum, ModelOptions, Rank, Step, StepOptions,
    UnitGradients, Values, WorldOptions,
};
use hsdp_comm::{Fault, FaultKind, Stage};
use hsdp_tests::support::models::unit;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{launched, mesh};

const CULPRIT: usize = 1;

/// Two replicas without shards: a group of one reduces in the call, and no other rank misses it.
fn finished(
    options: &ModelOptions,
    faults: Vec<Fault>,
    reduce: impl Fn(&mut Step<'_>, (usize, usize)) -> Result<(), Error> + Sync,
) -> Vec<String> {
    let world = WorldOptions { faults, ..WorldOptions::default() };
    let ended = launched(2, world, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, options)?;
        let mut step = model.begin_step(StepOptions::microbatches(2))?;
        for microbatch in 0..2 {
            reduce(&mut step, (rank, microbatch))?;
        }
        step.finish().map(drop)
    });
    let ended = ended.into_iter().map(|end| end.expect("no rank panics"));
    ended.map(|end| end.expect_err("a call has failed").to_string()).collect()
}

/// A microbatch that reduces one unit, and does not look whether that succeeds, as a careless
/// program does.
fn one_unit(step: &mut Step<'_>, gradient: impl GradientValues + 'static) -> Result<(), Error> {
    let mut pass = step.microbatch()?;
    let _ = pass.loss(LossSum::new(0.0, 1))?;
    let ignored = catch_unwind(AssertUnwindSafe(|| {
        let _ = pass.reduce(unit(2), UnitGradients::new().with(gradient).without());
    }));
    drop(ignored);
    pass.finish()
}

#[test]
fn a_step_whose_reduction_failed_does_not_finish() {
    for kind in [FaultKind::Error, FaultKind::OutOfMemory] {
        let faults = vec![Fault::at(Rank::new(CULPRIT), 0, (unit(2), Stage::Reduce), kind)];
        let told = finished(&ModelOptions::on(mesh(2, 1)), faults, |step, _| {
            one_unit(step, vec![1.0_f32; 93])
        });
        let own = &told[CULPRIT];
        let begins = "finish of a microbatch on rank 1, step 0: an earlier call of the step failed \
                      (reduce_scatter on rank 1, step 0: ";
        assert!(own.starts_with(begins), "{own}");
        assert!(told[0].starts_with("step 0 aborted by rank 1: reduce_scatter on"), "{}", told[0]);
    }
}

/// A gradient that panics when it is read to its end.
#[derive(Debug)]
struct Torn;

impl GradientValues for Torn {
    fn len(&self) -> usize {
        93
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        visit(Values::F32(&vec![1.0; range.len()]));
        panic!("the tensor is gone");
    }
}

#[test]
fn a_step_in_which_a_gradient_panicked_does_not_finish() {
    // In the third mode the other rank misses an all-reduce of that microbatch.
    for accumulation in [Accumulation::ReduceScatter, Accumulation::Local] {
        let options = ModelOptions { accumulation, ..ModelOptions::on(mesh(2, 1)) };
        let told = finished(&options, Vec::new(), |step, place| {
            if place == (CULPRIT, 0) {
                one_unit(step, Torn)
            } else {
                one_unit(step, vec![1.0_f32; 93])
            }
        });
        let own = "an earlier call of the step failed (a call panicked, and the panic was caught)";
        assert!(told[CULPRIT].contains(own), "{accumulation}: {}", told[CULPRIT]);
        assert!(told[0].starts_with("step 0 aborted by rank 1: "), "{accumulation}: {}", told[0]);
    }
}
