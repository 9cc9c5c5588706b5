//! Mistakes that one rank can see by itself are refused before anything is issued.

use std::fmt::Debug;

use hsdp_comm::{Channel, Error, Group, Lent, Pending, Reduction, Tag, World, WorldOptions};
use hsdp_sharding::Rank;

use super::settled;
use crate::common::results;

#[test]
fn an_average_of_integers_is_refused_before_it_is_issued() {
    results(2, |world| {
        let group = world.world_group(Channel::User);
        let refused = group.all_reduce(Tag::default(), Reduction::Avg, vec![1_u32]).map(drop);
        let expected = format!(
            "all_reduce on rank {}: u32 elements: only floating-point elements have an average",
            world.rank()
        );
        assert_eq!(refused.map_err(|error| error.to_string()), Err(expected));
        settled(group.barrier(Tag::default()));
    });
}

pub(super) fn refusal<T: Debug>(issued: Result<Pending<T>, Error>) -> String {
    issued.map(drop).expect_err("it is refused").to_string()
}

#[test]
fn what_one_rank_can_see_to_be_wrong_is_refused_with_numbers() {
    let world = &World::local(4, WorldOptions::default())[3];
    let group = world.world_group(Channel::User);
    let tag = Tag::default();
    assert_eq!(
        refusal(group.reduce_scatter(tag, Reduction::Sum, vec![0_f32; 1003])),
        "reduce_scatter on rank 3: the input has 1003 elements, expected a multiple of the group's 4 members"
    );
    assert_eq!(
        refusal(group.broadcast(tag, 4, vec![0_f32])),
        "broadcast on rank 3: the root is member 4, but the group has 4 members"
    );
    assert_eq!(
        refusal(group.scatter(tag, 3, Some(vec![0_f32; 7]), 2)),
        "scatter on rank 3: the input has 7 elements, expected 8: 2 for each of 4 members"
    );
    assert_eq!(
        refusal(group.all_to_all(tag, vec![0_f32; 4], vec![1; 4], vec![1, 1, 1, 2])),
        "all_to_all on rank 3: the part that it expects from itself has 2 elements, expected 1, as it sends to itself"
    );
}

#[test]
fn groups_that_cannot_be_are_refused() {
    let world = &World::local(3, WorldOptions::default())[1];
    let refused = |ranks: &[usize]| {
        let ranks: Vec<Rank> = ranks.iter().copied().map(Rank::new).collect();
        world.group(&ranks, Channel::User).expect_err("it is refused").to_string()
    };
    assert_eq!(refused(&[0, 2]), "group [0, 2] on rank 1 of 3: this rank is not among its members");
    assert_eq!(refused(&[1, 1]), "group [1, 1] on rank 1 of 3: a member is listed twice");
    assert_eq!(refused(&[1, 3]), "group [1, 3] on rank 1 of 3: a member is not in the world");
    assert_eq!(refused(&[]), "group [] on rank 1 of 3: this rank is not among its members");
}

#[test]
fn an_output_that_no_memory_is_large_enough_for() {
    results(2, |world| {
        world.set_step(3);
        let group = world.world_group(Channel::User);
        let count = usize::MAX / 16;
        let end =
            group.all_to_all(Tag::default(), vec![1_f32; 2], vec![1, 1], splits(&group, count));
        let end = end.map(drop).expect_err("nobody has so much");
        let bytes = 4 * (count + 1);
        let expected = format!(
            "all_to_all on rank {}, step 3: out of memory: {bytes} bytes for its output, in user, step 0, microbatch 0",
            world.rank()
        );
        assert_eq!(end.to_string(), expected);
        assert!(!end.is_fatal());
        // Nothing was issued: the next call is the first.
        settled(group.barrier(Tag::default()));
    });
}

/// One element from this member, `count` from the other.
fn splits(group: &Group, count: usize) -> Vec<usize> {
    (0..2).map(|member| if member == group.index() { 1 } else { count }).collect()
}

/// Counts whose sum wraps around to the length of the input: they were accepted, and the call aborted on its allocation.
#[test]
fn counts_whose_sum_is_no_number_are_refused() {
    let half = vec![1_usize << 63; 2];
    results(2, |world| {
        let group = world.world_group(Channel::User);
        let tag = Tag::default();
        let refused = refusal(group.all_to_all(tag, Vec::<f32>::new(), half.clone(), half.clone()));
        let expected = "the input has 0 elements, expected the sum of the send counts [9223372036854775808, 9223372036854775808]";
        assert_eq!(refused, format!("all_to_all on rank {}: {expected}", world.rank()));

        let receive = splits(&group, usize::MAX);
        let refused = refusal(group.all_to_all(tag, vec![1_f32; 2], vec![1, 1], receive.clone()));
        assert!(refused.contains(&format!("out of memory: {} bytes", usize::MAX)), "{refused}");

        let lent = Lent { source: vec![1_f32; 2], target: Vec::new() };
        let refused = refusal(group.all_to_all_into(tag, lent, vec![1, 1], receive));
        let expected = format!("the target has 0 elements, expected {}", usize::MAX);
        assert!(refused.ends_with(&expected), "{refused}");
        // Nothing was issued: the next call is the first.
        settled(group.barrier(tag));
    });
}

/// A rank without peers allocates the elements that it would receive, and counts their bytes.
#[test]
fn a_rank_without_peers_refuses_counts_that_no_memory_is_large_enough_for() {
    let world = World::counting(usize::MAX, Rank::new(7)).expect("a rank");
    let group = world.group(&[7, 9].map(Rank::new), Channel::User);
    let tag = Tag::default();
    let group = group.expect("a group");
    let refused = refusal(group.recv::<f64>(tag, 1, usize::MAX / 2));
    assert!(refused.contains("recv on rank 7, step 0: out of memory"), "{refused}");
    let refused = refusal(group.scatter::<f64>(tag, 1, None, usize::MAX / 2));
    assert!(refused.contains("scatter on rank 7, step 0: out of memory"), "{refused}");
}
