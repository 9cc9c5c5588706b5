//! The messages of a step, counted on ranks that share no memory.

use std::time::Duration;

use hsdp::comm::{Between, Messages};
use hsdp::{Error, ModelOptions, Optimizer, Sgd, SgdOptions, ShardedModel, World, WorldOptions};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::mesh;

/// The messages of the second step, by rank.
fn of_a_step(replicas: usize, shards: usize, microbatches: usize) -> Vec<Messages> {
    of_two_steps(replicas, shards, microbatches).into_iter().map(|[_, second]| second).collect()
}

/// The messages of the first step and of the second, by rank.
fn of_two_steps(replicas: usize, shards: usize, microbatches: usize) -> Vec<[Messages; 2]> {
    let options = WorldOptions {
        between: Between::Messages,
        deadline: Duration::from_secs(60),
        ..WorldOptions::default()
    };
    let ranks = hsdp::launch(replicas * shards, options, |world: World| {
        let on = ModelOptions::on(mesh(replicas, shards));
        let mut model = springs::model(world, &on)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let mut of_step = || {
            let before = model.world().messages();
            step(&mut model, &mut sgd, microbatches)?;
            Ok::<_, Error>(model.world().messages() - before)
        };
        Ok::<_, Error>([of_step()?, of_step()?])
    });
    ranks.into_iter().map(|rank| rank.expect("a step")).collect()
}

fn step(model: &mut ShardedModel, sgd: &mut Sgd, microbatches: usize) -> Result<(), Error> {
    let gradients = springs::gradients(model, microbatches)?;
    sgd.step(model, gradients).map(drop)
}

/// A header and a statement: two exchanges, of a message up and one down each.
const CONTROL: u64 = 4;

#[test]
fn control_messages_depend_neither_on_ranks_nor_on_microbatches() {
    // Of 64 ranks, some send to another one than rank 0.
    for (replicas, shards, microbatches) in [(1, 2, 1), (2, 2, 1), (2, 2, 4), (8, 8, 2)] {
        for (rank, messages) in of_a_step(replicas, shards, microbatches).iter().enumerate() {
            // Rank 0 sends and receives for the others alone.
            let control = if rank == 0 { 0 } else { CONTROL };
            assert_eq!(messages.control, control, "rank {rank} of {replicas}x{shards}");
        }
    }
}

/// In a first step whose units are used as declared also an exchange about their order, and one of
/// weights.
const FIRST_CONTROL: u64 = 8;

#[test]
fn control_messages_of_a_first_step_do_not_depend_on_units() {
    for (replicas, shards, microbatches) in [(1, 2, 1), (2, 2, 4)] {
        for (rank, [first, _]) in
            of_two_steps(replicas, shards, microbatches).iter().enumerate().skip(1)
        {
            assert_eq!(first.control, FIRST_CONTROL, "rank {rank} of {replicas}x{shards}");
        }
    }
}

#[test]
fn data_messages_go_to_members_of_the_groups_alone() {
    for (replicas, shards, microbatches) in [(2, 2, 1), (2, 3, 2)] {
        for (rank, messages) in of_a_step(replicas, shards, microbatches).iter().enumerate() {
            let [replicas, shards, k] = [replicas, shards, microbatches].map(|it| it as u64);
            // Three units: each is gathered for the forward and for the backward, and reduced, in
            // each microbatch. An all-reduce has two rounds.
            let to_shards = 3 * 3 * k * (shards - 1);
            let to_replicas = 3 * 2 * (replicas - 1);
            assert_eq!(messages.data, to_shards + to_replicas, "rank {rank}: {messages:?}");
        }
    }
}
