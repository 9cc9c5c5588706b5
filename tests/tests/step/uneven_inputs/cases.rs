//! The six cases of a loop in which one rank has 5 inputs and the other 6: with and without a
//! policy that lets them go on, and with a barrier of the user's in the loop, after it, or not at
//! all.

use std::time::Instant;

use hsdp::{
    DataError, Error, Mesh, ModelOptions, NextStep, Optimizer, ShardedModel, StepOptions, Uneven,
    World,
};
use hsdp_comm::{Channel, Reduction, Tag};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{DEADLINE, common, common_error, mesh, on_ranks, outcomes};

use crate::uneven_inputs::{
    Parameters, RECIPES, Recipe, assert_near, reference, reference_of, train,
};

const INPUTS: [u64; 2] = [5, 6];
const MESHES: [(usize, usize); 2] = [(1, 2), (2, 1)];

fn barrier(world: &World) -> Result<(), Error> {
    Ok(world.world_group(Channel::User).barrier(Tag::default())?.wait()?)
}

fn nothing(_: &World) -> Result<(), Error> {
    Ok(())
}

type Act = fn(&World) -> Result<(), Error>;

fn run(world: World, mesh: Mesh, uneven: Uneven, in_loop: Act) -> Result<ShardedModel, Error> {
    let inputs = INPUTS[world.rank().index()];
    let mut model = springs::model(world, &ModelOptions { uneven, ..ModelOptions::on(mesh) })?;
    let mut optimizer: Box<dyn Optimizer> = Recipe::Momentum.optimizer(&model);
    train(&mut model, &mut *optimizer, inputs, &in_loop)?;
    Ok(model)
}

fn joined(mesh: Mesh, in_loop: Act, after: Act) -> Parameters {
    common(on_ranks(2, |world| {
        let model = run(world, mesh, Uneven::ZeroWeight, in_loop)?;
        after(model.world())?;
        model.full_parameters()
    }))
}

/// Checks that no rank has waited until the deadline since then.
fn without_a_deadline(started: Instant) {
    assert!(started.elapsed() < DEADLINE / 2, "{:?}", started.elapsed());
}

/// The error of both ranks, and that it came before the deadline.
fn refused(in_loop: Act) -> String {
    let started = Instant::now();
    let error =
        common_error(outcomes(2, |world| run(world, mesh(1, 2), Uneven::Error, in_loop).map(drop)));
    without_a_deadline(started);
    error.to_string()
}

const UNEVEN: &str = "step 5: ranks 0 have no more data, ranks 1 still have data: give every rank the same number of \
                      batches, or choose Uneven::Stop or Uneven::ZeroWeight";

#[test]
fn case_1_join() {
    for (replicate, shard) in MESHES {
        let found = joined(mesh(replicate, shard), nothing, nothing);
        assert_near(&found, &reference(Recipe::Momentum, &INPUTS), "case 1");
    }
}

/// The optimizer's state is that of the data that there was, too: it shows in steps that are made
/// afterwards with it, by which momentum that a rank had missed would be carried on.
#[test]
fn case_1_join_leaves_the_state_of_the_optimizer_as_one_rank_has_it() {
    const MORE: u64 = 3;
    for recipe in RECIPES {
        let expected = reference_of(recipe, &[&INPUTS, &[MORE; 2]]);
        for (replicate, shard) in MESHES {
            let uneven = Uneven::ZeroWeight;
            let options = ModelOptions { uneven, ..ModelOptions::on(mesh(replicate, shard)) };
            let found = common(on_ranks(2, |world| {
                let inputs = INPUTS[world.rank().index()];
                let mut model = springs::model(world, &options)?;
                let mut optimizer = recipe.optimizer(&model);
                for inputs in [inputs, MORE] {
                    train(&mut model, &mut *optimizer, inputs, &nothing)?;
                }
                model.full_parameters()
            }));
            assert_near(&found, &expected, "steps after case 1");
        }
    }
}

#[test]
fn case_2_no_join() {
    assert_eq!(refused(nothing), UNEVEN);
}

#[test]
fn case_3_no_join_and_a_barrier_in_the_loop() {
    assert_eq!(refused(barrier), UNEVEN);
}

#[test]
fn case_4_join_and_a_barrier_in_the_loop() {
    for (replicate, shard) in MESHES {
        let found = joined(mesh(replicate, shard), barrier, nothing);
        assert_eq!(found, joined(mesh(replicate, shard), nothing, nothing));
    }
}

/// Another collective than a barrier cannot do without the rank that is out: both are told so at
/// its first call, the one by the call and the other by the step that is given up for it.
#[test]
fn case_4_join_and_another_collective_in_the_loop() {
    let sums = |world: &World| {
        let group = world.world_group(Channel::User);
        Ok(group.all_reduce(Tag::default(), Reduction::Sum, vec![1.0_f32])?.wait().map(drop)?)
    };
    let started = Instant::now();
    let told = outcomes(2, |world| run(world, mesh(1, 2), Uneven::ZeroWeight, sums).map(drop));
    without_a_deadline(started);
    let told: Vec<String> =
        told.into_iter().map(|it| it.expect_err("refused").to_string()).collect();
    let absent = "all_reduce on rank 1: ranks [0] have no data in this step: only a barrier can run without them";
    assert_eq!(told, [&format!("step 5 aborted by rank 1: {absent}"), absent]);
}

/// A loop that knows nothing of policies: a rank makes a step for each of its inputs, and then
/// stops.
fn plain_loop(world: World, uneven: Uneven, in_loop: Act) -> Result<ShardedModel, Error> {
    let rank = world.rank().index();
    let options = ModelOptions { uneven, ..ModelOptions::on(mesh(1, 2)) };
    let mut model = springs::model(world.clone(), &options)?;
    let mut optimizer = Recipe::Momentum.optimizer(&model);
    for number in 0..INPUTS[rank] {
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        springs::microbatch(&mut step, Batch::of(rank, number, 0))?;
        in_loop(&world)?;
        let gradients = step.finish()?;
        optimizer.step(&mut model, gradients)?;
    }
    Ok(model)
}

const ENDS: &str = "step 5: ranks 0 end their run after 5 steps, ranks 1 have data for another step: give every rank the \
                    same number of batches, or choose Uneven::Stop or Uneven::ZeroWeight";

/// Cases 2 and 3 with a loop that knows nothing of policies, and says where it ends: no rank
/// succeeds.
#[test]
fn cases_2_and_3_a_plain_loop_that_says_where_it_ends_is_refused_on_all_ranks() {
    for in_loop in [nothing, barrier] as [Act; 2] {
        for uneven in [Uneven::Error, Uneven::ZeroWeight] {
            let started = Instant::now();
            let error =
                common_error(outcomes(2, |world| plain_loop(world, uneven, in_loop)?.end_run()));
            without_a_deadline(started);
            assert_eq!(error.to_string(), ENDS);
            assert!(!error.is_fatal());
        }
    }
}

/// A loop that ends without a word has left: the rank that has another step is told so, the other
/// one nothing.
#[test]
fn cases_2_and_3_a_plain_loop_that_says_nothing_has_left() {
    for in_loop in [nothing, barrier] as [Act; 2] {
        let told = outcomes(2, |world| plain_loop(world, Uneven::Error, in_loop).map(drop));
        let [Ok(()), Err(error)] = &told[..] else { panic!("{told:?}") };
        let message = error.to_string();
        assert!(message.starts_with("world aborted: rank 0, step 4, last in "), "{message}");
        assert!(message.contains(": it left, but others wait for it in "), "{message}");
    }
}

/// Data that is left over under `Stop` is not an error, and a rank that asks without data is at the
/// end, too.
#[test]
fn the_end_of_a_run_is_common_where_nobody_has_data_that_is_to_be_used() {
    let stopped = common(on_ranks(2, |world| {
        let rank = world.rank().index();
        let ended = plain_loop(world, Uneven::Stop, nothing);
        if rank == 0 {
            let mut model = ended?;
            model.end_run()?;
            return Ok(model.committed_steps());
        }
        let error = ended.expect_err("rank 0 has no sixth input");
        assert!(matches!(error, Error::Data(DataError::EndOfData { step: 5, .. })), "{error}");
        Ok(5)
    }));
    assert_eq!(stopped, 5);
    let _ = on_ranks(2, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        if rank == 0 {
            return model.end_run();
        }
        let next = model.next_step(StepOptions::microbatches(1).without_data())?;
        assert!(matches!(next, NextStep::End(_)), "{next:?}");
        Ok(())
    });
    let _ = on_ranks(2, |world| springs::model(world, &ModelOptions::on(mesh(1, 2)))?.end_run());
}

/// Rank 0 goes on to its barrier while rank 1 begins another step.
#[test]
fn case_5_no_join_and_a_barrier_after_the_loop() {
    let started = Instant::now();
    let error = common_error(outcomes(2, |world| {
        let model = plain_loop(world, Uneven::Error, nothing)?;
        barrier(model.world())
    }));
    without_a_deadline(started);
    let message = error.to_string();
    assert!(message.starts_with("collective mismatch"), "{message}");
    for row in
        ["rank 0: waits for ranks [1] in barrier", "rank 1: waits for ranks [0] in all_gather"]
    {
        assert!(message.contains(row), "{message}");
    }
}

#[test]
fn case_6_join_and_a_barrier_after_the_loop() {
    for (replicate, shard) in MESHES {
        let found = joined(mesh(replicate, shard), nothing, barrier);
        assert_eq!(found, joined(mesh(replicate, shard), nothing, nothing));
    }
}
