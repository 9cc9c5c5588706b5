//! Faults that a world cannot have: it does not begin, on any rank, and no rank waits.

use std::time::{Duration, Instant};

use hsdp_comm::WorldError::BadFault;
use hsdp_comm::{
    Between, Channel, Error, Fault, FaultKind, Pending, Rendezvous, Tag, World, WorldOptions,
};
use hsdp_sharding::Rank;

use super::options;
use crate::common::outcomes;

fn bad() -> [(Fault, &'static str); 3] {
    let finite = |value| Fault::at(Rank::new(0), 1, 0, FaultKind::NonFinite(value));
    [
        (Fault::at(Rank::new(2), 1, 0, FaultKind::Panic), "the world has 2 ranks, numbered from 0"),
        (finite(5.0), "a gradient of 5 is finite in every dtype"),
        (finite(-65519.0), "a gradient of -65519 is finite in every dtype"),
    ]
}

#[test]
fn a_launch_begins_no_rank() {
    for (fault, problem) in bad() {
        let ended = outcomes(2, options([fault]), |_| panic!("no rank begins"));
        for (rank, ended) in ended.into_iter().enumerate() {
            let failure = ended.map(|()| "it began").expect_err("it is refused");
            assert_eq!(failure.rank, Rank::new(rank));
            let text = failure.message.to_string();
            assert!(text.contains(&fault.to_string()) && text.ends_with(problem), "{text}");
        }
    }
}

#[test]
fn a_rendezvous_refuses_the_first_that_joins() {
    for (fault, problem) in bad() {
        let deadline = Duration::from_secs(60);
        let rendezvous = Rendezvous::new(2, WorldOptions { deadline, ..options([fault]) });
        let started = Instant::now();
        for rank in [1, 0] {
            let refused = rendezvous.join(Rank::new(rank), 2).map(drop);
            let text = refused.expect_err("there is no world").to_string();
            assert!(text.ends_with(problem), "{text}");
        }
        assert!(started.elapsed() < deadline / 2, "the first waits for no other");
    }
}

#[test]
fn the_ranks_of_a_local_world_find_it_over() {
    for between in [Between::Memory, Between::Messages] {
        for (fault, problem) in bad() {
            for world in World::local(2, WorldOptions { between, ..options([fault]) }) {
                let group = world.world_group(Channel::User);
                let end = group.barrier(Tag::default()).and_then(Pending::wait);
                let end = end.expect_err("it is over");
                assert!(matches!(end, Error::World(BadFault { .. })) && end.is_fatal(), "{end}");
                assert!(end.to_string().ends_with(problem), "{end}");
                assert_eq!(world.end(), Some(end));
            }
        }
    }
}
