//! No plan's schedule deadlocks: every accumulation mode on every mesh up to 8x8, whatever number of kernels a device has under way.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use hsdp_flight::Channel;
use hsdp_sharding::step::Sequences;
use hsdp_sharding::{Accumulation, Mesh, ModelSpec, Param, Plan, PlanOptions, Unit};
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
    accumulation: Accumulation,
    placement: ModelPlacement,
    microbatches: Microbatches,
) -> Order {
    let options = PlanOptions { accumulation, ..PlanOptions::default() };
    let plan = Arc::new(Plan::new(spec(), mesh, options).expect("a plan"));
    Order::of(&plan, microbatches, placement)
}

const GIVEN: Microbatches = Microbatches::Given(2);
const ASKED: Microbatches = Microbatches::Asked(2);

fn meshes() -> impl Iterator<Item = Mesh> {
    let sizes = (1..=8).flat_map(|replicas| (1..=8).map(move |shards| (replicas, shards)));
    sizes.map(|(replicas, shards)| Mesh::new(replicas, shards).expect("a mesh"))
}

#[test]
fn devices_with_any_number_of_kernels() {
    for (mesh, accumulation) in meshes().flat_map(|mesh| Accumulation::ALL.map(|it| (mesh, it))) {
        for microbatches in [GIVEN, ASKED] {
            let order = order(mesh, accumulation, ModelPlacement::Device, microbatches);
            for kernels in [NonZeroU32::new(1), NonZeroU32::new(2), None] {
                for sequences in [Sequences::OfEachChannel, Sequences::One] {
                    let schedules = order.schedules(kernels, sequences).expect("few actions");
                    let verdict = judge(&schedules);
                    assert_eq!(
                        verdict,
                        ScheduleVerdict::Ok,
                        "{mesh}, {accumulation}, {kernels:?}, {sequences:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn models_in_host_memory() {
    for (mesh, accumulation) in meshes().flat_map(|mesh| Accumulation::ALL.map(|it| (mesh, it))) {
        for microbatches in [GIVEN, ASKED] {
            let order = order(mesh, accumulation, ModelPlacement::Host, microbatches);
            let schedules = order.schedules(None, Sequences::OfEachChannel).expect("few actions");
            assert_eq!(judge(&schedules), ScheduleVerdict::Ok, "{mesh}, {accumulation}");
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
    for (placement, sequences, [gather, reduce, all_reduce]) in [
        (ModelPlacement::Host, Sequences::OfEachChannel, [1, 2, 3]),
        (ModelPlacement::Device, Sequences::One, [1, 1, 1]),
    ] {
        let order = order(mesh, Accumulation::Every, placement, GIVEN);
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
