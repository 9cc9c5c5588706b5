//! Steps that are given up leave nothing behind on a device.

use std::collections::BTreeMap;

use hsdp::{
    Accumulation, AdamW, AdamWOptions, Error, ModelOptions, Optimizer, ShardedModel, StepOptions,
};
use hsdp_tests::support::handmade::Until;
use hsdp_tests::support::models::keeping_the_second;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, on_ranks};

use super::{DEVICE, PLACES, placed};

/// One step of two microbatches.
fn step(model: &mut ShardedModel, adamw: &mut AdamW) -> Result<(), Error> {
    let gradients = springs::gradients(model, 2)?;
    adamw.step(model, gradients).map(drop)
}

/// A step that rank 1 gives up in its second microbatch. The batches are such as no other step has.
fn give_up(model: &mut ShardedModel, until: Until) -> Result<(), Error> {
    let rank = model.rank().index();
    let mut step = model.begin_step(StepOptions::microbatches(2))?;
    let first = springs::microbatch(&mut step, Batch::of(rank, 9, 0));
    if rank == 1 {
        first?;
        springs::microbatch_until(&mut step, Batch::of(rank, 9, 1), until)?;
        step.abandon("it is enough");
        return Ok(());
    }
    let told = first
        .and_then(|()| springs::microbatch(&mut step, Batch::of(rank, 9, 1)))
        .and_then(|()| step.finish().map(drop))
        .expect_err("rank 1 has given it up");
    assert_eq!(told.to_string(), "step 1 aborted by rank 1: it is enough");
    Ok(())
}

/// Three steps, of which the second is first given up, where that is asked for.
fn trained(options: &ModelOptions, given_up: Option<Until>) -> BTreeMap<String, Vec<f32>> {
    common(on_ranks(options.mesh.world_size(), |world| {
        let mut model = springs::model_of(world, &keeping_the_second(), options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        step(&mut model, &mut adamw)?;
        if let Some(until) = given_up {
            give_up(&mut model, until)?;
        }
        step(&mut model, &mut adamw)?;
        step(&mut model, &mut adamw)?;
        model.full_parameters()
    }))
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_step_that_is_given_up_leaves_no_trace() {
    let moments =
        [Until::FirstForward, Until::Forward, Until::FirstBackward, Until::Backward, Until::End];
    for accumulation in Accumulation::ALL {
        let [expected, untouched] = PLACES.map(|placement| {
            trained(&ModelOptions { accumulation, ..placed(placement, [2, 2]) }, None)
        });
        assert_eq!(untouched, expected, "{accumulation}");
        for until in moments {
            let options = ModelOptions { accumulation, ..placed(DEVICE, [2, 2]) };
            assert_eq!(trained(&options, Some(until)), expected, "{accumulation}, {until:?}");
        }
    }
}
