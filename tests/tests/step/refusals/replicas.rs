//! Replicas of a shard compare its bits where the options ask for that, and a difference is an
//! error.

use std::num::NonZeroU64;

use hsdp::{Error, Gradients, ModelOptions, ShardedModel, World};
use hsdp_comm::{Channel, Op};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

/// An update of SGD, on a machine that flips one bit if `flips` says so.
fn update(model: &mut ShardedModel, gradients: Gradients, mut flips: bool) -> Result<(), Error> {
    let updated = model.update(gradients, |run| {
        for (parameter, gradient) in run.parameters.iter_mut().zip(run.gradient.iter()) {
            *parameter -= 1e-3 * gradient;
        }
        if run.unit.index() == 1 && std::mem::take(&mut flips) {
            run.parameters[0] = f32::from_bits(run.parameters[0].to_bits() ^ 1);
        }
    });
    updated.map(drop)
}

fn train(world: World, every: Option<u64>, flip: Option<u64>) -> Result<u64, Error> {
    let compare_replicas = every.and_then(NonZeroU64::new);
    let options = ModelOptions { compare_replicas, ..ModelOptions::on(mesh(3, 2)) };
    let rank = world.rank().index();
    let mut model = springs::model(world.clone(), &options)?;
    let before = world.ledger().op(Channel::Control, Op::AllGather).calls;
    for number in 0..10 {
        let gradients = springs::gradients(&mut model, 1)?;
        update(&mut model, gradients, rank == 4 && flip == Some(number))?;
    }
    Ok(world.ledger().op(Channel::Control, Op::AllGather).calls - before)
}

#[test]
fn a_flipped_bit_is_found_by_the_next_comparison_and_names_the_ranks() {
    let error = common_error(outcomes(6, |world| train(world, Some(4), Some(5))));
    let message = error.to_string();
    assert!(error.is_fatal());
    assert!(
        message.starts_with("the content of a shard differs between ranks: rank 4 has 0x"),
        "{message}"
    );
    assert!(message.contains("rank 0 has 0x"), "{message}");
}

#[test]
fn without_a_comparison_it_goes_on_unseen() {
    let _ = on_ranks(6, |world| train(world, None, Some(5)));
}

#[test]
fn replicas_that_agree_go_on_and_a_comparison_is_one_exchange() {
    let exchanges = |every| common(on_ranks(6, |world| train(world, every, None)));
    // Before steps 4 and 8.
    assert_eq!(exchanges(Some(4)), exchanges(None) + 2);
}
