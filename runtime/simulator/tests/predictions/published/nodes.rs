//! Speeds on one, two and four machines, as replicas and as one group of shards: those on one and two imply those on four.
//!
//! oumi-ai/oumi, pull request 213: a Llama of 1.8e9 parameters (HuggingFaceFW/ablation-model-fineweb-v1) on machines of a cloud, `HYBRID_SHARD` and
//! `FULL_SHARD`. A run of that day is named `4node.4xA10040GB.20steps.bs16.gas16` in tests of that repository: 4 cards a machine, 16 sequences of a
//! microbatch, 16 microbatches, of which Accelerate reduces the last alone. A GPT of as many parameters stands for the model.

use std::sync::Arc;

use hsdp_sharding::{Accumulation, DType, Mesh, Offload, Plan, PlanOptions};
use hsdp_simulator::{Batch, GptShape, Machine, Microbatches, Recompute, Workload};

use super::{BANDWIDTH, EFFICIENCY, gigabits, scale, seconds};

const MODEL: GptShape =
    GptShape { width: 2048, heads: 32, layers: 34, context: 2048, vocabulary: 50_272 };
const SEQUENCES: usize = 16;
const MICROBATCHES: usize = 16;
/// Cards of a machine.
const CARDS: usize = 4;
/// Samples a second on one machine, two and four; and on four as one group of shards.
const REPLICAS: [(usize, f64); 3] = [(1, 21.7), (2, 40.8), (4, 74.41)];
const ONE_GROUP: (usize, f64) = (4, 55.35);

fn step(replicas: usize, shards: usize) -> Workload {
    let options = PlanOptions {
        accumulation: Accumulation::Local,
        param_dtype: DType::BF16,
        reduce_dtype: DType::BF16,
        ..PlanOptions::default()
    };
    let mesh = Mesh::new(replicas, shards).expect("a mesh");
    Workload {
        plan: Arc::new(Plan::new(MODEL.spec(), mesh, options).expect("a plan")),
        computation: Arc::new(MODEL.computation().expect("a computation")),
        batch: Batch {
            sequences: SEQUENCES,
            context: MODEL.context,
            dtype: DType::BF16,
            recompute: Recompute::Nothing,
        },
        microbatches: Microbatches::Asked(MICROBATCHES as u64),
        offload: Offload::None,
    }
}

/// Samples a second.
fn speed(machine: &Machine, replicas: usize, shards: usize) -> f64 {
    let samples = replicas * shards * SEQUENCES * MICROBATCHES;
    samples as f64 / seconds(machine, &step(replicas, shards))
}

#[test]
fn one_and_two_machines_predict_four() {
    let mut machine = Machine::bundled("a100-cluster").expect("a machine");
    for (name, value) in [("ranks", CARDS as f64), ("links.network.adapters", 1.0)] {
        machine.set(name, value, "oumi").expect("possible");
    }
    let [(_, alone), (two, together), (four, measured)] = REPLICAS;
    for _ in 0..30 {
        let by = alone / speed(&machine, 1, CARDS);
        scale(&mut machine, EFFICIENCY, by);
    }
    for _ in 0..60 {
        let by = together / speed(&machine, two, CARDS);
        scale(&mut machine, BANDWIDTH, by.powi(8));
    }
    let implied = speed(&machine, two, CARDS);
    assert!((implied / together - 1.0).abs() < 0.002, "{implied}");
    let width = gigabits(&machine);
    println!(
        "{alone} and {together} samples/s on one and two machines: {width:.0} Gb/s between them"
    );
    let (machines, in_one_group) = ONE_GROUP;
    let cases = [
        ("replicas", speed(&machine, four, CARDS), measured, 8.0),
        ("one group of shards", speed(&machine, 1, machines * CARDS), in_one_group, 25.0),
    ];
    for (kind, predicted, measured, bound) in cases {
        let error = 100.0 * (predicted / measured - 1.0);
        println!("four machines as {kind}: {predicted:.1} of {measured} samples/s ({error:+.1} %)");
        assert!(error.abs() < bound, "{kind}: {predicted}");
    }
}
