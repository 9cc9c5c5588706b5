//! The time of an update in the memory of a machine's host.

use std::sync::Arc;

use hsdp_sharding::{DType, Mesh, ModelSpec, Offload, Param, Plan, PlanOptions, State, Unit};
use hsdp_simulator::{
    Batch, Computation, Hints, Machine, Microbatches, Recompute, Share, Workload,
};

const ELEMENTS: usize = 1 << 26;

/// Seconds of the norm and of the update of AdamW on each rank of one group of shards.
fn seconds(machine: &Machine, shards: usize, offload: Offload) -> f64 {
    let unit = Unit::new("u").param(Param::new("w", [ELEMENTS]));
    let spec = ModelSpec::new().unit(unit).updated_by(|_| State::Elements(2));
    let hints = Hints { lookup: &|_| false, attention: &|_| None };
    let computation = Computation::of(&spec, &hints).expect("a computation");
    let options = PlanOptions { param_dtype: DType::BF16, ..PlanOptions::default() };
    let plan = Plan::new(spec, Mesh::new(1, shards).expect("a mesh"), options).expect("a plan");
    let batch =
        Batch { sequences: 1, context: 1, dtype: DType::BF16, recompute: Recompute::Nothing };
    let workload = Workload {
        plan: Arc::new(plan),
        computation: Arc::new(computation),
        batch,
        microbatches: Microbatches::Given(1),
        offload,
    };
    let prediction = workload.predict(machine).expect("a prediction");
    prediction.timing.ranks[0].shares.of(Share::Optimizer).seconds()
}

/// Bytes of an element by the link: gradients there, and with the state alone parameters there and back, or with all the copies in bf16 back.
#[test]
fn cards_share_the_memory_of_their_host() {
    let mut machine = Machine::bundled("a100-node").expect("a machine");
    let numbers = [
        ("memory.bandwidth", 1000e9),
        ("memory.efficiency", 1.0),
        ("compute.launch", 1e-12),
        ("compute.kernel", 1e-12),
        ("host.bandwidth", 10e9),
        ("host.efficiency", 1.0),
        ("host.memory", 80e9),
    ];
    for (name, value) in numbers {
        machine.set(name, value, "a test").expect("it is possible");
    }
    // The gradient and the copy in bf16 once; the parameter and the two of its state once each way.
    let passed = 4.0 + 2.0 + 3.0 * 8.0;
    for shards in [1, 2, 8] {
        let elements = (ELEMENTS / shards) as f64;
        let norm = elements * 4.0 / 1000e9;
        for (offload, copied) in [(Offload::Optimizer, 12.0), (Offload::All, 6.0)] {
            let host = elements * passed * shards as f64 / 80e9;
            let expected = norm + elements * copied / 10e9 + host;
            let found = seconds(&machine, shards, offload);
            assert!(
                (found / expected - 1.0).abs() < 1e-3,
                "{shards}, {offload}: {found}, {expected}"
            );
        }
        let on_card = norm + elements * passed / 1000e9;
        let found = seconds(&machine, shards, Offload::None);
        assert!((found / on_card - 1.0).abs() < 1e-3, "{shards}: {found}, {on_card}");
    }
}
