//! No plan's schedule deadlocks: every accumulation mode on every mesh up to 8x8, whatever number of kernels a device has under way.

use std::num::NonZeroU32;
use std::sync::Arc;

use hsdp_sharding::step::Sequences;
use hsdp_sharding::{Accumulation, Mesh, ModelSpec, Param, Plan, PlanOptions, Unit};
use hsdp_simulator::{Microbatches, ModelPlacement, Order, ScheduleVerdict, judge};

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
