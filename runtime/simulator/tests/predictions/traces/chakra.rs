//! Chakra's files.

use std::collections::BTreeMap;
use std::io;

use hsdp_flight::Op;
use hsdp_sharding::{Accumulation, Rank, StateOver};
use hsdp_simulator::{Microbatches, ModelPlacement, simulate};
use proptest::prelude::*;

use super::case::{CASE, Case, Given, Prepared};
use super::replay::Files;
use super::wire::{self, COMM_COLL_NODE, COMP_NODE, Node};

/// Picoseconds of a microsecond, in which durations of files are.
const MICROSECOND: u64 = 1_000_000;

/// `enum CollectiveCommType`.
const ALL_REDUCE: u64 = 0;
const ALL_GATHER: u64 = 2;
const REDUCE_SCATTER: u64 = 7;

fn files(prepared: &Prepared) -> Files {
    let ranks = prepared.order.mesh.ranks().map(|rank| nodes(prepared, rank)).collect();
    Files { ranks, groups: groups(prepared) }
}

fn nodes(prepared: &Prepared, rank: Rank) -> Vec<Node> {
    let mut file = Vec::new();
    prepared.traces().write_chakra(rank, &mut file).expect("memory has room");
    let (version, nodes) = wire::read(&file);
    assert_eq!(version, "0.0.4");
    nodes
}

fn groups(prepared: &Prepared) -> BTreeMap<u64, Vec<usize>> {
    let mut json = Vec::new();
    prepared.traces().write_chakra_groups(&mut json).expect("memory has room");
    let groups: BTreeMap<u64, Vec<usize>> = serde_json::from_slice(&json).expect("JSON");
    assert!(!groups.contains_key(&0), "ASTRA-sim keeps this number for all ranks");
    let all = (0..prepared.order.mesh.world_size()).collect();
    groups.into_iter().chain([(0, all)]).collect()
}

#[test]
fn groups_are_rows_and_columns_of_the_mesh() {
    let on = |mesh, placement| {
        let mut groups = groups(&Case { mesh, placement, ..CASE }.prepare());
        groups.remove(&0);
        groups
    };
    let of = |mesh| on(mesh, ModelPlacement::Device);
    let expected =
        [(1, vec![0, 1, 2]), (2, vec![3, 4, 5]), (3, vec![0, 3]), (4, vec![1, 4]), (5, vec![2, 5])];
    assert_eq!(of([2, 3]), BTreeMap::from(expected));
    assert_eq!(of([1, 2]), BTreeMap::from([(1, vec![0, 1])]));
    assert_eq!(of([2, 1]), BTreeMap::from([(3, vec![0, 1])]));
    assert_eq!(of([1, 1]), BTreeMap::new());
    // In host memory the reductions of a row are a sequence of their own.
    let host = on([2, 2], ModelPlacement::Host);
    let expected = [
        (1, vec![0, 1]),
        (2, vec![2, 3]),
        (3, vec![0, 2]),
        (4, vec![1, 3]),
        (5, vec![0, 1]),
        (6, vec![2, 3]),
    ];
    assert_eq!(host, expected.into());
}

#[test]
fn nodes_are_as_the_schema_has_them() {
    let files = files(&CASE.prepare());
    for (rank, nodes) in files.ranks.iter().enumerate() {
        for (place, node) in nodes.iter().enumerate() {
            assert_eq!(node.id, 1 + place as u64, "identifiers are in order, each once");
            assert!(node.deps.iter().all(|id| (1..node.id).contains(id)), "{node:?}");
            assert!(place == 0 || !node.deps.is_empty(), "one node is the first: {node:?}");
            match node.kind {
                COMP_NODE => assert_eq!(node.names(), ["is_cpu_op"]),
                COMM_COLL_NODE => {
                    assert_eq!(node.names(), ["comm_size", "comm_type", "is_cpu_op", "pg_name"]);
                    assert!(!node.is_cpu_op(), "ASTRA-sim refuses communication of a CPU");
                    assert!(files.groups[&node.group()].contains(&rank), "{node:?}");
                }
                kind => panic!("kind {kind}"),
            }
        }
    }
}

/// Units of 64 f32 over 2 shards: what a member puts into each operation, in bytes.
#[test]
fn sizes_are_those_that_a_member_puts_in() {
    let nodes = nodes(&CASE.prepare(), Rank::new(3));
    let of = |name: &str| {
        let found: Vec<_> = nodes.iter().filter(|node| node.name == name).collect();
        let say =
            |node: &&Node| (node.integer("comm_type"), node.integer("comm_size"), node.group());
        (found.len(), found.iter().map(say).next().expect("there is one"))
    };
    // Three microbatches gather twice each, but the last unit of a forward is the first of the
    // backward.
    assert_eq!(of("all_gather layers.0"), (6, (ALL_GATHER, 32 * 4, 2)));
    assert_eq!(of("reduce_scatter layers.0"), (3, (REDUCE_SCATTER, 64 * 4, 2)));
    assert_eq!(of("all_reduce layers.0"), (1, (ALL_REDUCE, 32 * 4, 4)));
    assert_eq!(of("all_gather header"), (1, (ALL_GATHER, 9 * 8, 0)));
    assert_eq!(of("all_gather agreement"), (1, (ALL_GATHER, 10 * 8, 0)));
}

/// Members of a gather of slices put in 16 of the 32 f32 of a shard.
#[test]
fn slices_are_gathered_before_the_units_for_which_they_are_needed() {
    let nodes = nodes(&Case { state: StateOver::World, ..CASE }.prepare(), Rank::new(3));
    let place = |name: &str| {
        let mut places = (0..nodes.len()).filter(|place| nodes[*place].name == name);
        let place = places.next().expect("there is one");
        assert_eq!(places.next(), None, "{name}");
        place
    };
    let say = |name: &str| {
        let node = &nodes[place(name)];
        (node.integer("comm_type"), node.integer("comm_size"), node.group())
    };
    assert_eq!(say("scatter_sums layers.0"), (REDUCE_SCATTER, 32 * 4, 4));
    assert_eq!(say("gather_slices layers.0"), (ALL_GATHER, 16 * 4, 4));
    let all = ["update embed", "all_gather header", "gather_slices embed", "scatter_sums embed"];
    assert!(all.map(place).is_sorted(), "{:?}", all.map(place));
    let gather = nodes.iter().position(|node| node.name == "all_gather embed");
    assert!(gather > Some(place("gather_slices embed")), "{gather:?}");
    assert!(nodes.iter().all(|it| it.name != "update" && !it.name.starts_with("all_reduce")));
}

#[test]
fn operations_among_one_rank_are_left_out() {
    let collectives = |mesh| {
        let files = files(&Case { mesh, ..CASE }.prepare());
        files
            .collectives(0)
            .into_iter()
            .map(|(group, nodes)| (group, nodes.len()))
            .collect::<Vec<_>>()
    };
    assert_eq!(collectives([1, 1]), []);
    assert_eq!(collectives([2, 1]), [(0, 2), (3, 3)]);
    assert_eq!(collectives([1, 2]), [(0, 2), (1, 3 * 9)]);
}

#[test]
fn ranks_of_one_color_differ_in_their_groups_alone() {
    let prepared = Case { mesh: [2, 3], ..CASE }.prepare();
    let strip = |rank| {
        let nodes = nodes(&prepared, Rank::new(rank));
        let say =
            |it: &Node| (it.name.clone(), it.deps.clone(), it.duration_micros, it.is_cpu_op());
        nodes.iter().map(say).collect::<Vec<_>>()
    };
    assert_eq!(strip(0), strip(2));
    assert_ne!(strip(0), strip(3), "groups of the second row are slower");
}

/// Durations are whole microseconds: their sum is that of the times, not of the rounded times.
#[test]
fn rounding_does_not_add_up() {
    let costs = Given { unit: 300_000, ..CASE.costs };
    let prepared = Case { costs, ..CASE }.prepare();
    let device = |it: &&Node| it.kind == COMP_NODE && !it.is_cpu_op();
    let micros: u64 =
        nodes(&prepared, Rank::new(0)).iter().filter(device).map(|it| it.duration_micros).sum();
    // Units 1, 2 and 3 in both directions, where the backward takes twice the forward, and the
    // loss; then norm and update.
    let multiples = 11 * (3 * (6 + 12 + 1) + 2);
    assert_eq!(micros, (multiples * 300_000 + 500_000) / 1_000_000);
}

#[test]
fn an_operation_that_no_step_has_is_refused() {
    let mut prepared = CASE.prepare();
    prepared.order.blocks[0].operations[0].op = Op::Permute;
    let refused = prepared.traces().write_chakra(Rank::new(0), &mut Vec::new());
    let refused = refused.expect_err("it is refused");
    assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    assert_eq!(refused.to_string(), "permute is no operation of a step");
}

#[test]
fn a_sink_that_is_full_ends_the_file() {
    let mut small = [0; 100];
    let ended = CASE.prepare().traces().write_chakra(Rank::new(0), &mut small.as_mut_slice());
    assert_eq!(ended.expect_err("it is full").kind(), io::ErrorKind::WriteZero);
}

/// Returns whether the graph says all that the simulator knows: on a device, ranks exchange nothing
/// in the midst of a step, nor while slices are gathered; on a host, no thread waits to see which
/// reduce-scatters are complete.
fn is_exact(case: &Case) -> bool {
    let asks = case.placement == ModelPlacement::Host
        && case.mesh[0] > 1
        && case.accumulation != Accumulation::Every;
    let in_stream = case.placement == ModelPlacement::Device
        && (matches!(case.microbatches, Microbatches::Asked(_))
            || case.batch_norms > 0
            || case.state == StateOver::World && case.mesh[0] > 1);
    !asks && !in_stream
}

fn check(case: Case) -> Result<(), TestCaseError> {
    let prepared = case.prepare();
    let files = files(&prepared);
    for (group, members) in &files.groups {
        let of = |rank: &usize| {
            let say =
                |it: &&Node| (it.name.clone(), it.integer("comm_type"), it.integer("comm_size"));
            files
                .collectives(*rank)
                .remove(group)
                .unwrap_or_default()
                .iter()
                .map(say)
                .collect::<Vec<_>>()
        };
        for rank in members {
            prop_assert_eq!(of(rank), of(&members[0]));
        }
    }
    let time = files.time();
    let one = files.time_with_one_communication();
    let step = simulate(&prepared.order, &prepared.costs).expect("it ends").step;
    if is_exact(&case) {
        prop_assert_eq!(time * MICROSECOND, step.picoseconds());
    } else if case.placement == ModelPlacement::Device {
        prop_assert!(time * MICROSECOND >= step.picoseconds());
    }
    match case.placement {
        ModelPlacement::Device => prop_assert_eq!(one, Some(time)),
        ModelPlacement::Host => prop_assert!(one.is_some_and(|one| one >= time)),
    }
    Ok(())
}

prop_compose! {
    fn cases()(
        mesh in [1..4usize, 1..4usize], on_device: bool, mode in 0..3usize,
        count in 1..5u64, asked: bool, state in 0..2usize,
        prefetch in 0..4usize, batch_norms in 0..4usize,
        (gather, reduce, all_reduce, exchange) in (0..20u64, 0..20u64, 0..50u64, 0..5u64),
        (call, launch, computation) in (0..5u64, 0..20u64, 0..20u64),
    ) -> Case {
        Case {
            mesh,
            placement: if on_device { ModelPlacement::Device } else { ModelPlacement::Host },
            accumulation: Accumulation::ALL[mode],
            microbatches: match asked {
                true => Microbatches::Asked(count),
                false => Microbatches::Given(count),
            },
            prefetch,
            state: StateOver::ALL[state],
            batch_norms,
            costs: Given {
                unit: MICROSECOND,
                gather,
                reduce,
                all_reduce,
                exchange,
                call,
                launch,
                computation,
            },
        }
    }
}

proptest! {
    /// All members have the same collectives in the same order; the graphs take the time that the
    /// simulator says; and no rank waits forever where one communication of a rank takes place at a
    /// time.
    #[test]
    fn the_graphs_take_the_time_of_the_step(case in cases()) {
        check(case)?;
    }
}
