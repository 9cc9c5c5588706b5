//! No plan's schedule deadlocks: every accumulation mode on every mesh up to 8x8, with state over
//! shards and over the world, whatever number of kernels a device has under way.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use hsdp_flight::Channel;
use hsdp_sharding::step::Sequences;
use hsdp_sharding::{Accumulation, Mesh, ModelSpec, Param, Plan, PlanOptions, StateOver, Unit};
use hsdp_simulator::{Microbatches, ModelPlacement, Order, ScheduleVerdict, StepBlock, judge};
use serde_json::{Value, json};

/// Four units: one is kept, and two have a batch norm over all ranks.
fn spec() -> ModelSpec {
    let unit =
        |index: usize| Unit::new(format!("u{index}")).param(Param::new(format!("w{index}"), [24]));
    let normed = |index: usize| unit(index).batch_norm(&format!("bn{index}"), 3);
    ModelSpec::new().unit(normed(0)).unit(unit(1).keep()).unit(normed(2)).unit(unit(3))
}

fn order(
    mesh: Mesh,
    (accumulation, state): (Accumulation, StateOver),
    placement: ModelPlacement,
    microbatches: Microbatches,
) -> Order {
    let options = PlanOptions { accumulation, state, ..PlanOptions::default() };
    let plan = Arc::new(Plan::new(spec(), mesh, options).expect("a plan"));
    Order::of(&plan, microbatches, placement)
}

const GIVEN: Microbatches = Microbatches::Given(2);
const ASKED: Microbatches = Microbatches::Asked(2);

fn meshes() -> impl Iterator<Item = Mesh> {
    let sizes = (1..=8).flat_map(|replicas| (1..=8).map(move |shards| (replicas, shards)));
    sizes.map(|(replicas, shards)| Mesh::new(replicas, shards).expect("a mesh"))
}

/// Returns all meshes, with all modes of each.
fn modes() -> impl Iterator<Item = (Mesh, (Accumulation, StateOver))> {
    let modes = || StateOver::ALL.map(|state| Accumulation::ALL.map(|it| (it, state)));
    meshes().flat_map(move |mesh| modes().into_iter().flatten().map(move |mode| (mesh, mode)))
}

#[test]
fn devices_with_any_number_of_kernels() {
    for (mesh, mode) in modes() {
        for microbatches in [GIVEN, ASKED] {
            let order = order(mesh, mode, ModelPlacement::Device, microbatches);
            for kernels in [NonZeroU32::new(1), NonZeroU32::new(2), None] {
                for sequences in [Sequences::OfEachChannel, Sequences::One] {
                    let schedules = order.schedules(kernels, sequences).expect("few actions");
                    let verdict = judge(&schedules);
                    assert_eq!(
                        verdict,
                        ScheduleVerdict::Ok,
                        "{mesh}, {mode:?}, {kernels:?}, {sequences:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn models_in_host_memory() {
    for (mesh, mode) in modes() {
        for microbatches in [GIVEN, ASKED] {
            let order = order(mesh, mode, ModelPlacement::Host, microbatches);
            let schedules = order.schedules(None, Sequences::OfEachChannel).expect("few actions");
            assert_eq!(judge(&schedules), ScheduleVerdict::Ok, "{mesh}, {mode:?}");
        }
    }
}

/// Counts the operations of a rank by the first word of their communicator, and collects their
/// streams.
fn by_channel(list: &Value) -> BTreeMap<String, (u64, BTreeSet<u64>)> {
    let mut channels = BTreeMap::<String, (u64, BTreeSet<u64>)>::new();
    for action in list.as_array().expect("a list") {
        let Some(name) = action["comm"].as_str() else { continue };
        let channel = name.split(' ').next().expect("a word");
        let (count, streams) = channels.entry(channel.to_owned()).or_default();
        *count += 1;
        streams.insert(action["stream"].as_u64().expect("a number"));
    }
    channels
}

/// Statistics have a group of their own in the runtime, and are never part of the one sequence.
#[test]
fn each_channel_has_communicators_of_its_own() {
    let mesh = Mesh::new(2, 2).expect("a mesh");
    let placements = [
        (ModelPlacement::Host, Sequences::OfEachChannel, [1, 2, 3]),
        (ModelPlacement::Device, Sequences::One, [1, 1, 1]),
    ];
    for (state, (placement, sequences, [gather, reduce, all_reduce])) in
        StateOver::ALL.into_iter().flat_map(|state| placements.map(|it| (state, it)))
    {
        let order = order(mesh, (Accumulation::Every, state), placement, GIVEN);
        let mut expected = BTreeMap::new();
        for (channel, stream) in [
            (Channel::Control, 0),
            (Channel::Gather, gather),
            (Channel::Reduce, reduce),
            (Channel::AllReduce, all_reduce),
            (Channel::Statistics, 6),
        ] {
            let count = |block: &StepBlock| {
                let of_channel = block.operations.iter().filter(|it| it.channel == channel);
                block.times * of_channel.count() as u64
            };
            let count: u64 = order.blocks.iter().map(count).sum();
            assert!(count > 0, "{channel}");
            expected.insert(channel.to_string(), (count, BTreeSet::from([stream])));
        }
        let schedules = order.schedules(None, sequences).expect("few actions");
        let schedules = serde_json::to_value(&schedules).expect("JSON");
        assert_eq!(schedules["communicators"]["statistics world"], json!([0, 1, 2, 3]));
        for list in schedules["schedules"].as_array().expect("a list of lists") {
            assert_eq!(by_channel(list), expected, "{placement:?}");
        }
    }
}

/// Replicas that divide state scatter sums, and gather slices, where others all-reduce.
#[test]
fn slices_are_on_the_communicators_of_replicas() {
    let mesh = Mesh::new(2, 2).expect("a mesh");
    let operations = |state| {
        let mode = (Accumulation::ReduceScatter, state);
        let order = order(mesh, mode, ModelPlacement::Host, GIVEN);
        let schedules = order.schedules(None, Sequences::OfEachChannel).expect("few actions");
        let schedules = serde_json::to_value(&schedules).expect("JSON");
        assert_eq!(schedules["communicators"]["all_reduce replicate 1"], json!([1, 3]));
        let list = schedules["schedules"][3].as_array().expect("a list");
        let of_replicas = list.iter().filter(|it| it["comm"] == "all_reduce replicate 1");
        of_replicas.map(|it| format!("{} {}", it["op"], it["count"])).collect::<Vec<_>>()
    };
    // Shards of units with a batch norm have more elements. Updates go forward.
    let named = |op: &str, counts: [u64; 4]| counts.map(|count| format!("\"{op}\" {count}"));
    let backward = [32, 64, 32, 64];
    assert_eq!(operations(StateOver::Shards), named("all_reduce", backward));
    let gathers = named("all_gather", [64, 32, 64, 32]);
    let world = [gathers, named("reduce_scatter", backward)].concat();
    assert_eq!(operations(StateOver::World), world);
}
