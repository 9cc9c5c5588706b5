//! The six cases of a loop in which one rank has 5 inputs and the other 6: with and without a policy that lets them go
//! on, and with a barrier of the user's in the loop, after it, or not at all.

use std::time::{Duration, Instant};

use hsdp::{Error, Mesh, ModelOptions, Optimizer, ShardedModel, Uneven, World};
use hsdp_comm::{Channel, Reduction, Tag};
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

use crate::{Parameters, Recipe, assert_near, model, reference, train};

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
    let mut model = model(world, &ModelOptions { uneven, ..ModelOptions::on(mesh) })?;
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

/// The error of both ranks, and that it came at once.
fn refused(in_loop: Act) -> String {
    let started = Instant::now();
    let error =
        common_error(outcomes(2, |world| run(world, mesh(1, 2), Uneven::Error, in_loop).map(drop)));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    error.to_string()
}

const UNEVEN: &str = "step 5: ranks 0 have no more data, ranks 1 have: give every rank as many batches, or choose \
                      Uneven::Stop or Uneven::ZeroWeight";

#[test]
fn case_1_join() {
    for (replicate, shard) in MESHES {
        let found = joined(mesh(replicate, shard), nothing, nothing);
        assert_near(&found, &reference(Recipe::Momentum, &INPUTS), "case 1");
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

/// Another collective than a barrier cannot do without the rank that is out: both are told so at its first call.
#[test]
fn case_4_join_and_another_collective_in_the_loop() {
    let sums = |world: &World| {
        let group = world.world_group(Channel::User);
        Ok(group.all_reduce(Tag::default(), Reduction::Sum, vec![1.0_f32])?.wait().map(drop)?)
    };
    let started = Instant::now();
    let told = outcomes(2, |world| run(world, mesh(1, 2), Uneven::ZeroWeight, sums).map(drop));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    let told: Vec<String> =
        told.into_iter().map(|it| it.expect_err("refused").to_string()).collect();
    let absent = "all_reduce on rank 1: ranks [0] have no data in this step: only a barrier does without them";
    assert_eq!(told, ["step 5 aborted by rank 1: the step was dropped before its finish", absent]);
}

/// A loop that knows nothing of the policy: rank 0 goes on to its barrier while rank 1 begins another step.
#[test]
fn case_5_no_join_and_a_barrier_after_the_loop() {
    let started = Instant::now();
    let error = common_error(outcomes(2, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut optimizer = Recipe::Momentum.optimizer(&model);
        for number in 0..INPUTS[rank] {
            let mut step = model.begin_step(hsdp::StepOptions::microbatches(1))?;
            let batch = hsdp_tests::support::springs::Batch::of(rank, number, 0);
            hsdp_tests::support::springs::microbatch(&mut step, batch)?;
            let gradients = step.finish()?;
            optimizer.step(&mut model, gradients)?;
        }
        barrier(model.world())
    }));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
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
