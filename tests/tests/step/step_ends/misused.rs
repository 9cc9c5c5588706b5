//! Code of the caller that runs inside a call of the model, and uses the model, panics or lies
//! there: an error or the end of the world follows, at once, and no rank goes on with wrong
//! parameters.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hsdp::{
    Accumulation, Error, GradientValues, Gradients, LossSum, ModelOptions, PassHandle,
    ShardedModel, StepOptions, UnitGradients, Values, World,
};
use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{AbortReason, Error as CommError};
use hsdp_tests::support::models::{one_parameter, unit};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{DEADLINE, mesh, on_ranks, outcomes};

const ELEMENTS: usize = 100;

fn model(world: World, accumulation: Accumulation) -> Result<ShardedModel, Error> {
    let options = ModelOptions { accumulation, ..ModelOptions::on(mesh(2, 2)) };
    ShardedModel::new(world, one_parameter(ELEMENTS), options, springs::initial)
}

/// The gradients of a step, and a handle of its microbatch.
fn finished(model: &mut ShardedModel) -> Result<(PassHandle, Gradients), Error> {
    let rank = model.rank().index();
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let pass = step.microbatch()?;
    let handle = pass.handle();
    springs::forward_and_backward(pass, Batch::of(rank, 0, 0))?;
    Ok((handle, step.finish()?))
}

/// Whether a call from inside another one was refused, with the names of both.
fn is_refused(called: &Result<(), Error>, operation: &str, outer: &[&str]) -> bool {
    let said = called.as_ref().map_or_else(ToString::to_string, |()| String::new());
    let inside = |it: &&str| said.ends_with(&format!("called from inside another call: {it}"));
    said.starts_with(&format!("{operation} on rank ")) && outer.iter().any(inside)
}

#[test]
fn a_handle_that_is_used_in_an_update_is_refused() {
    let started = Instant::now();
    on_ranks(4, |world| {
        let mut model = model(world, Accumulation::ReduceScatter)?;
        let (handle, gradients) = finished(&mut model)?;
        let mut refused = 0;
        model.update(gradients, |_| {
            let calls = [
                (handle.unshard(unit(0)).map(drop), "unshard"),
                (handle.reduce(unit(0), UnitGradients::new()), "reduce"),
            ];
            refused += calls
                .iter()
                .filter(|(called, name)| is_refused(called, name, &["optimizer step"]))
                .count();
        })?;
        assert_eq!(refused, 2, "the shard is one run");
        model.end_run()
    });
    assert!(started.elapsed() < DEADLINE / 4, "no rank waits for itself");
}

/// Ones, that use a handle of their own microbatch when they are read.
struct Recursive {
    handle: PassHandle,
    refused: Mutex<Vec<bool>>,
}

impl fmt::Debug for Recursive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recursive")
    }
}

impl GradientValues for Recursive {
    fn len(&self) -> usize {
        ELEMENTS
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        let called = self.handle.unshard(unit(0)).map(drop);
        // Without shards to sum, the call itself reads it.
        // In mode `Local` the call itself reads it.
        let outer = ["the reading of a gradient", "reduce"];
        self.refused.lock().expect("no panic").push(is_refused(&called, "unshard", &outer));
        visit(Values::F32(&vec![1.0; range.len()]));
    }
}

/// Also by a worker, or by another rank, while the gradient's own rank waits in the model.
#[test]
fn a_handle_that_is_used_while_a_gradient_is_read_is_refused() {
    for accumulation in Accumulation::ALL {
        let started = Instant::now();
        on_ranks(4, |world| {
            let mut model = model(world, accumulation)?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let mut pass = step.microbatch()?;
            let gradient = Arc::new(Recursive { handle: pass.handle(), refused: Mutex::default() });
            let _ = pass.loss(LossSum::new(0.0, 1))?;
            let shared: Arc<dyn GradientValues> = Arc::<Recursive>::clone(&gradient);
            pass.reduce(unit(0), [Some(shared)].into_iter().collect())?;
            pass.finish()?;
            let gradients = step.finish()?;
            assert_eq!(gradients.full(&model)?["w"], vec![1.0; ELEMENTS]);
            let refused = gradient.refused.lock().expect("no panic");
            assert!(!refused.is_empty() && refused.iter().all(|refused| *refused), "{refused:?}");
            Ok(())
        });
        assert!(started.elapsed() < DEADLINE / 4, "{accumulation}: no rank waits for itself");
    }
}

/// The program catches the panic and goes on: its parameters are those of no step, on one rank or
/// on all.
#[test]
fn an_update_that_panics_ends_the_world_where_the_next_step_would_begin() {
    for culprits in [1..2, 0..4] {
        let told = outcomes(4, |world| {
            let rank = world.rank().index();
            let mut model = model(world, Accumulation::ReduceScatter)?;
            let (_, gradients) = finished(&mut model)?;
            let update = AssertUnwindSafe(|| {
                model.update(gradients, |run| {
                    run.parameters.fill(0.0);
                    assert!(!culprits.contains(&rank), "an optimizer is broken");
                })
            });
            assert_eq!(catch_unwind(update).is_err(), culprits.contains(&rank));
            model.begin_step(StepOptions::microbatches(1)).map(drop)
        });
        for (rank, told) in told.into_iter().enumerate() {
            let told = told.expect_err("parameters are half updated");
            let Error::Comm(CommError::World(Aborted { rank: culprit, reason, .. })) = &told else {
                panic!("rank {rank}: {told}");
            };
            let AbortReason::Requested { reason } = reason else { panic!("rank {rank}: {told}") };
            let named =
                format!("optimizer step on rank {culprit}, step 0: the update has not ended");
            assert!(reason.starts_with(&named), "rank {rank}: {told}");
            assert!(culprits.contains(&culprit.index()), "rank {rank}: {told}");
        }
    }
}
