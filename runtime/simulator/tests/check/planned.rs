//! No plan's schedule deadlocks: every accumulation mode on every mesh up to 8x8, whatever number of kernels a device has under way.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use hsdp_sharding::{Accumulation, Mesh, ModelSpec, Param, Plan, PlanOptions, Rank, Unit};
use hsdp_simulator::{
    DataPresence, LossScale, Microbatches, ModelPlacement, Order, Orders, RankStep,
    ScheduleVerdict, Streams, judge,
};

/// Four units, of which one is kept.
fn spec() -> ModelSpec {
    let unit =
        |index: usize| Unit::new(format!("u{index}")).param(Param::new(format!("w{index}"), [24]));
    ModelSpec::new().unit(unit(0)).unit(unit(1).keep()).unit(unit(2)).unit(unit(3))
}

fn orders(
    mesh: Mesh,
    accumulation: Accumulation,
    placement: ModelPlacement,
    microbatches: Microbatches,
    absent: &[usize],
) -> Orders {
    let options = PlanOptions { accumulation, ..PlanOptions::default() };
    let plan = Arc::new(Plan::new(spec(), mesh, options).expect("a plan"));
    let order = |data| {
        let loss_scale = LossScale::Fixed;
        (data, Order::of(&plan, RankStep { microbatches, placement, data, loss_scale }))
    };
    let of = BTreeMap::from([DataPresence::Present, DataPresence::Absent].map(order));
    Orders { mesh, placement, of, absent: absent.iter().copied().map(Rank::new).collect() }
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
        for (absent, microbatches) in [(&[][..], GIVEN), (&[0], GIVEN), (&[0], ASKED)] {
            let orders = orders(mesh, accumulation, ModelPlacement::Device, microbatches, absent);
            for kernels in [NonZeroU32::new(1), NonZeroU32::new(2), None] {
                for streams in [Streams::OfEachChannel, Streams::One] {
                    let schedules = orders.schedules(kernels, streams).expect("few actions");
                    let verdict = judge(&schedules);
                    assert_eq!(
                        verdict,
                        ScheduleVerdict::Ok,
                        "{mesh}, {accumulation}, {kernels:?}, {streams:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn models_in_host_memory() {
    for (mesh, accumulation) in meshes().flat_map(|mesh| Accumulation::ALL.map(|it| (mesh, it))) {
        for (absent, microbatches) in [(&[][..], GIVEN), (&[0], GIVEN), (&[0], ASKED)] {
            let orders = orders(mesh, accumulation, ModelPlacement::Host, microbatches, absent);
            let schedules = orders.schedules(None, Streams::OfEachChannel).expect("few actions");
            assert_eq!(
                judge(&schedules),
                ScheduleVerdict::Ok,
                "{mesh}, {accumulation}, {absent:?}"
            );
        }
    }
}

/// The reason for the one order on devices: channels that are independent, as in host memory, deadlock if kernels are few.
#[test]
fn the_order_of_host_memory_would_deadlock_on_a_device() {
    let mesh = Mesh::new(2, 2).expect("a mesh");
    let orders = orders(mesh, Accumulation::ReduceScatter, ModelPlacement::Host, GIVEN, &[0]);
    let schedules = orders.schedules(NonZeroU32::new(1), Streams::OfEachChannel);
    let verdict = judge(&schedules.expect("few actions"));
    assert!(matches!(verdict, ScheduleVerdict::Deadlock(_)), "{verdict}");
}
