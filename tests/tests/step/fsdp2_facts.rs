//! Facts about gradient accumulation in PyTorch's FSDP2 (torch 2.15) that must not be facts here.
//!
//! | there | here |
//! |---|---|
//! | a dropped step's partial survives `zero_grad`: 101 for 1 | a dropped step leaves nothing |
//! | `optimizer.step()` on pending partials silently does nothing | it cannot be written |
//! | the running sum is in the wire dtype: 256, 1, -256 give 0; 300 ones give 256 | partials are f32 |
//! | f16 factors ignore the number of microbatches: 64000 overflows | the all-reduce makes room for them |
//! | the divide factor may change in mid-accumulation | it is fixed with the model, and compared |
//! | shard size 1, a custom factor and f16 divide twice | an axis of size 1 divides nothing |

use std::collections::BTreeMap;

use hsdp::{
    Accumulation, DType, Error, LossScaling, ModelOptions, Objective, Optimizer, Precision, Sgd,
    SgdOptions, ShardedModel, StepOptions,
};
use hsdp_comm::{Channel, Tag};
use hsdp_tests::support::models::one_parameter;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};
use hsdp_tests::support::{slopes, springs};

/// Enough for every rank of every mesh here to hold some.
const ELEMENTS: usize = 200;

#[test]
fn a_dropped_step_leaves_nothing_for_the_next() {
    for accumulation in Accumulation::ALL {
        let options = ModelOptions { accumulation, ..mean_over_ranks(2, 2, DType::F32) };
        let gradients = on_ranks(4, |world| {
            let mut model = model(world, &options)?;
            drop_a_step_after(&mut model, 100.0)?;
            accumulated(&mut model, StepOptions::microbatches(1), &[1.0])
        });
        assert_eq!(common(gradients), everywhere(1.0), "{accumulation}"); // and not 101
    }
}

/// The rest of it is a matter of types: see
/// `runtime/tests/compile_fail/optimizer_without_finish.rs`.
#[test]
fn gradients_do_not_come_out_of_a_step_that_misses_microbatches() {
    let options = mean_over_ranks(2, 2, DType::F32);
    let refused = on_ranks(4, |world| {
        let everybody = world.world_group(Channel::User);
        let mut model = model(world, &options)?;
        let mut step = model.begin_step(StepOptions::microbatches(2))?;
        slopes::microbatch(&mut step, 1.0)?;
        everybody.barrier(Tag::default())?.wait()?;
        Ok(step.finish().expect_err("a microbatch is missing").to_string())
    });
    for (rank, message) in refused.iter().enumerate() {
        let expected = "1 microbatches are done, the step was begun with 2";
        assert_eq!(*message, format!("finish on rank {rank}, step 0: {expected}"));
    }
}

#[test]
fn small_gradients_between_large_ones_are_not_lost_on_a_16_bit_wire() {
    for accumulation in Accumulation::ALL {
        for (replicate, shard) in [(2, 2), (1, 4), (4, 1)] {
            let options =
                ModelOptions { accumulation, ..mean_over_ranks(replicate, shard, DType::BF16) };
            assert_eq!(
                gradient(&options, &[256.0, 1.0, -256.0]),
                everywhere(1.0),
                "{accumulation}"
            );
        }
    }
}

#[test]
fn three_hundred_microbatches_of_1_give_300_and_not_256() {
    for (replicate, shard) in [(2, 2), (1, 4), (4, 1)] {
        for accumulation in Accumulation::ALL {
            let options =
                ModelOptions { accumulation, ..mean_over_ranks(replicate, shard, DType::BF16) };
            assert_eq!(gradient(&options, &[1.0; 300]), everywhere(300.0), "{accumulation}");
        }
    }
}

/// 8 times 8000 fit an f16, and overflowed all the same; 8 times 60000 fit the f32 that they are
/// accumulated in.
#[test]
fn an_f16_wire_has_room_for_eight_microbatches() {
    for (replicate, shard) in [(2, 2), (2, 8), (4, 1), (1, 4)] {
        for accumulation in Accumulation::ALL {
            let options =
                ModelOptions { accumulation, ..mean_over_ranks(replicate, shard, DType::F16) };
            let on = format!("{replicate}x{shard} {accumulation}");
            assert_eq!(gradient(&options, &[8000.0; 8]), everywhere(64000.0), "{on}");
            assert_eq!(gradient(&options, &[60000.0; 8]), everywhere(480_000.0), "{on}");
        }
    }
}

#[test]
fn a_factor_is_the_same_from_a_steps_begin_to_its_end_on_all_ranks() {
    let error = common_error(outcomes(4, |world| {
        let factor = if world.rank().index() == 2 { 16.0 } else { 8.0 };
        let objective = Objective::Factor(factor);
        let options = ModelOptions { objective, ..ModelOptions::on(mesh(2, 2)) };
        model(world, &options)
    }));
    assert_eq!(
        error.to_string(),
        "an option of the model differs between ranks: rank 2 has objective Factor(16.0), \
         rank 0 has objective Factor(8.0)"
    );
}

#[test]
fn a_factor_divides_once_where_the_shard_axis_has_one_rank() {
    for wire in [DType::F32, DType::BF16, DType::F16] {
        for (replicate, shard) in [(4, 1), (2, 2), (1, 4), (1, 1)] {
            let precision = Precision { wire, ..Precision::default() };
            let objective = Objective::Factor(8.0);
            let options =
                ModelOptions { objective, precision, ..ModelOptions::on(mesh(replicate, shard)) };
            let ranks: f32 = [0.0, 1.0, 2.0, 3.0, 4.0][replicate * shard];
            assert_eq!(
                gradient(&options, &[16.0, 16.0]),
                everywhere(ranks * 32.0 / 8.0),
                "{wire} {replicate}x{shard}"
            );
        }
    }
}

#[test]
fn a_loss_scale_divides_once_as_well() {
    let options = ModelOptions {
        loss_scaling: LossScaling::Fixed(128.0),
        ..mean_over_ranks(4, 1, DType::F16)
    };
    assert_eq!(gradient(&options, &[3.0, 5.0]), everywhere(8.0));
}

#[test]
fn what_was_accumulated_before_an_update_is_not_in_the_next_step() {
    let options = mean_over_ranks(2, 2, DType::F32);
    let gradients = on_ranks(4, |world| {
        let mut model = model(world, &options)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let mut step = model.begin_step(StepOptions::microbatches(2))?;
        slopes::microbatch(&mut step, 70.0)?;
        slopes::microbatch(&mut step, 30.0)?;
        let gradients = step.finish()?;
        sgd.step(&mut model, gradients)?;
        accumulated(&mut model, StepOptions::microbatches(1), &[1.0])
    });
    assert_eq!(common(gradients), everywhere(1.0));
}

/// The mean over ranks, summed over microbatches: what FSDP2 computes.
fn mean_over_ranks(replicate: usize, shard: usize, wire: DType) -> ModelOptions {
    let precision = Precision { wire, ..Precision::default() };
    ModelOptions {
        objective: Objective::RankMean,
        precision,
        ..ModelOptions::on(mesh(replicate, shard))
    }
}

fn model(world: hsdp::World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, one_parameter(ELEMENTS), options.clone(), springs::initial)
}

/// The gradient that all ranks agree on after microbatches of these slopes.
fn gradient(options: &ModelOptions, slopes: &[f32]) -> BTreeMap<String, Vec<f32>> {
    let known = StepOptions::microbatches(slopes.len());
    let unknown = StepOptions { microbatches: None, ..known };
    let [known, unknown] = [known, unknown].map(|step| {
        let run = |world| accumulated(&mut model(world, options)?, step, slopes);
        common(on_ranks(options.mesh.world_size(), run))
    });
    assert_eq!(known, unknown, "whether the number of microbatches is known makes no difference");
    known
}

/// Begins a step, reduces one of its two microbatches on all ranks, and gives it up.
fn drop_a_step_after(model: &mut ShardedModel, slope: f32) -> Result<(), Error> {
    let everybody = model.world().world_group(Channel::User);
    let mut step = model.begin_step(StepOptions::microbatches(2))?;
    slopes::microbatch(&mut step, slope)?;
    everybody.barrier(Tag::default())?.wait()?;
    drop(step);
    Ok(())
}

fn accumulated(
    model: &mut ShardedModel,
    step: StepOptions,
    slopes: &[f32],
) -> Result<BTreeMap<String, Vec<f32>>, Error> {
    let mut step = model.begin_step(step)?;
    for slope in slopes {
        slopes::microbatch(&mut step, *slope)?;
    }
    step.finish()?.full(model)
}

/// This gradient on every element.
fn everywhere(gradient: f32) -> BTreeMap<String, Vec<f32>> {
    BTreeMap::from([("w".to_owned(), vec![gradient; ELEMENTS])])
}
