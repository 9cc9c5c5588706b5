//! Worlds that are given up.

use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{Channel, Error, StepFailure, World, WorldOptions};

use super::{settled, sum, tag};
use crate::common::outcomes;

#[test]
fn an_abort_ends_what_is_pending_and_what_comes_later() {
    let ends = outcomes(3, WorldOptions::default(), |world| {
        let group = world.world_group(Channel::User);
        if world.rank().index() == 1 {
            world.abort("out of memory: 4096 bytes for wte");
        }
        let first = settled(group.barrier(tag())).expect_err("aborted");
        let second = settled(group.barrier(tag())).expect_err("aborted");
        assert_eq!(first, second);
        assert_eq!(world.end().as_ref(), Some(&first));
        first.to_string()
    });
    for end in ends {
        let end = end.expect("no panic");
        assert!(end.starts_with("world aborted: rank 1, step 0, "), "{end}");
        assert!(end.ends_with("out of memory: 4096 bytes for wte"), "{end}");
    }
}

#[test]
fn groups_of_one_end_with_their_world_too() {
    let world = World::single();
    assert_eq!(sum(&world, vec![1.0]), Ok(vec![1.0]));
    world.abort_step(StepFailure { step: 3, reason: "no data".to_owned() });
    assert!(matches!(sum(&world, vec![1.0]), Err(Error::StepAborted { step: 3, .. })));
    assert_eq!(world.next_epoch(), 1);
    assert_eq!(sum(&world, vec![1.0]), Ok(vec![1.0]));
    world.abort("enough");
    assert!(matches!(sum(&world, vec![1.0]), Err(Error::World(Aborted { .. }))));
}

#[test]
fn an_operation_of_a_group_of_one_is_what_a_rank_did_last() {
    let world = World::single();
    assert_eq!(sum(&world, vec![1.0]), Ok(vec![1.0]));
    world.abort("enough");
    let end = world.end().expect("it has ended").to_string();
    assert!(end.contains("last in all_reduce sum f32 1 element"), "{end}");
}
