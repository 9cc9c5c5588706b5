use std::collections::BTreeMap;

use hsdp_sharding::{Axis, Mesh, Rank};
use proptest::prelude::*;

use super::{Shape, ShapePart, Shapes};
use crate::Machine;

fn mesh(replicate: usize, shard: usize) -> Mesh {
    Mesh::new(replicate, shard).expect("a mesh")
}

fn cluster(cards: usize) -> Machine {
    let mut cluster = Machine::bundled("a100-cluster").expect("it is bundled");
    cluster.set("ranks", cards as f64, "a test").expect("a number of cards");
    cluster
}

fn shape(mesh: Mesh, cards: usize, axis: Axis, rank: usize) -> Shape {
    Shapes::new(mesh, &cluster(cards)).expect("it fits").group(axis, Rank::new(rank))
}

const fn part(members: usize, groups: usize, machines: usize) -> ShapePart {
    ShapePart { members, groups, machines }
}

#[test]
fn a_group_on_one_machine_shares_no_network() {
    let shard = shape(mesh(2, 8), 8, Axis::Shard, 11);
    assert_eq!(shard.parts(), [part(8, 1, 1)]);
    assert_eq!((shard.members(), shard.machines(), shard.most_members()), (8, 1, 8));
    assert_eq!(shape(mesh(4, 2), 8, Axis::Replicate, 3).parts(), [part(4, 1, 1)]);
}

#[test]
fn columns_of_a_mesh_share_the_network_of_each_machine() {
    let column = shape(mesh(3, 8), 8, Axis::Replicate, 11);
    assert_eq!(column.parts(), [part(1, 8, 3)]);
    assert_eq!((column.members(), column.machines(), column.most_members()), (3, 3, 1));
    assert_eq!(shape(mesh(4, 4), 8, Axis::Replicate, 0).parts(), [part(2, 4, 2)]);
}

#[test]
fn rows_that_straddle_machines_share_one() {
    let rows = [0, 12].map(|rank| shape(mesh(2, 12), 8, Axis::Shard, rank));
    assert_eq!(rows[0].parts(), [part(4, 2, 1), part(8, 1, 1)]);
    assert_eq!(rows[0], rows[1]);
    let rows = [0, 3, 6, 9, 12, 15].map(|rank| shape(mesh(6, 3), 8, Axis::Shard, rank));
    let [inside, _, across, _, _, second] = rows;
    assert_eq!(inside.parts(), [part(3, 1, 1)]);
    assert_eq!(across.parts(), [part(1, 2, 1), part(2, 1, 1)]);
    assert_eq!(across, second);
}

#[test]
fn all_ranks_fill_machines() {
    let shapes = Shapes::new(mesh(5, 4), &cluster(8)).expect("it fits");
    assert_eq!(shapes.world().parts(), [part(4, 1, 1), part(8, 1, 2)]);
}

#[test]
fn the_groups_of_a_host_share_its_memory() {
    let host = Machine::bundled("two-core-cpu").expect("it is bundled");
    let shapes = Shapes::new(mesh(2, 3), &host).expect("any number of ranks fits");
    assert_eq!(shapes.group(Axis::Shard, Rank::new(4)).parts(), [part(3, 2, 1)]);
    assert_eq!(shapes.group(Axis::Replicate, Rank::new(4)).parts(), [part(2, 3, 1)]);
    assert_eq!(shapes.world().parts(), [part(6, 1, 1)]);
}

#[test]
fn a_machine_without_network_has_so_many_cards() {
    let node = Machine::bundled("a100-node").expect("it is bundled");
    assert!(Shapes::new(mesh(2, 4), &node).is_ok());
    assert_eq!(
        Shapes::new(mesh(3, 3), &node).expect_err("there are eight").to_string(),
        "machine a100-node has 8 cards and no network: it cannot hold the 9 ranks of mesh 3x3"
    );
}

/// The members of each group along `axis` by machine.
fn counts(mesh: Mesh, cards: usize, axis: Axis) -> BTreeMap<Vec<Rank>, BTreeMap<usize, usize>> {
    let mut counts: BTreeMap<Vec<Rank>, BTreeMap<usize, usize>> = BTreeMap::new();
    for rank in mesh.ranks() {
        let group = counts.entry(mesh.group(axis, rank)).or_default();
        *group.entry(rank.index() / cards).or_default() += 1;
    }
    counts
}

proptest! {
    #[test]
    fn shapes_are_those_of_a_count_of_all_ranks(replicate in 1..12_usize, width in 1..12_usize, cards in 1..10_usize) {
        let mesh = mesh(replicate, width);
        let shapes = Shapes::new(mesh, &cluster(cards)).expect("it fits");
        for axis in [Axis::Replicate, Axis::Shard] {
            let counts = counts(mesh, cards, axis);
            for (group, machines) in &counts {
                let others = |at: &usize| counts.values().filter(|it| it.len() > 1 && it.contains_key(at)).count();
                let expected = machines.iter().map(|(at, members)| (*members, others(at).max(1)));
                let expected = match machines.len() {
                    1 => Shape::new([(group.len(), 1)]),
                    _ => Shape::new(expected),
                };
                for rank in group {
                    prop_assert_eq!(&shapes.group(axis, *rank), &expected);
                }
            }
        }
    }
}
