//! Ranks whose closures fail: the error is theirs, and its text reaches the others.

use std::error::Error as StdError;
use std::time::Instant;

use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{AbortReason, Between, Channel, Error, RankFailure, WorldOptions, launch};
use hsdp_sharding::Rank;

use super::{PROMPTLY, sum, tag};

type AnyError = Box<dyn StdError + Send + Sync>;

#[test]
fn an_error_ends_the_world_and_the_others_get_its_text() {
    for between in [Between::Memory, Between::Messages] {
        let options = WorldOptions { between, ..WorldOptions::default() };
        let started = Instant::now();
        let ends = launch(3, options, |world| -> Result<Vec<f32>, AnyError> {
            sum(&world, vec![1.0])?;
            if world.rank().index() == 1 {
                return Err("the tokens cannot be read".into());
            }
            Ok(sum(&world, vec![1.0])?)
        });
        assert!(started.elapsed() < PROMPTLY, "{between:?}: {:?}", started.elapsed());
        for (rank, end) in ends.into_iter().enumerate() {
            let error = end.expect_err("rank 1 has failed");
            if rank == 1 {
                assert_eq!(error.to_string(), "the tokens cannot be read");
                continue;
            }
            let Some(Error::World(Aborted { rank: culprit, reason, .. })) = error.downcast_ref()
            else {
                panic!("{between:?}, rank {rank}: {error}")
            };
            let reason = reason.clone();
            let told = AbortReason::Requested { reason: "the tokens cannot be read".into() };
            assert_eq!((*culprit, reason), (Rank::new(1), told), "{between:?}, rank {rank}");
        }
    }
}

#[test]
fn an_error_takes_no_result_from_ranks_that_have_all_they_wait_for() {
    for _ in 0..50 {
        let ends = launch(3, WorldOptions::default(), |world| {
            let all = world.world_group(Channel::User).barrier(tag())?.wait();
            if world.rank().index() == 1 {
                return Err(RankFailure { rank: world.rank(), message: "it fails".into() }.into());
            }
            all
        });
        let failed = RankFailure { rank: Rank::new(1), message: "it fails".into() };
        assert_eq!(ends, [Ok(()), Err(Error::RankFailed(failed)), Ok(())]);
    }
}

#[test]
fn a_panic_is_the_error_of_its_rank() {
    let ends = launch(2, WorldOptions::default(), |world| {
        assert!(world.rank().index() == 0, "batch {} is bad", 12);
        sum(&world, vec![1.0])
    });
    let message = "batch 12 is bad";
    let failure = RankFailure { rank: Rank::new(1), message: message.into() };
    assert_eq!(ends[1], Err(Error::RankFailed(failure)));
    let told = ends[0].as_ref().expect_err("rank 1 panics").to_string();
    assert!(told.starts_with("world aborted: rank 1, ") && told.contains(message), "{told}");
}
