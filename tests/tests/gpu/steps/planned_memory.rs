//! The memory that a model holds on a device, by category, against the plan's formulas.

use hsdp::memory::{self, Category};
use hsdp::{
    Accumulation, ByteCount, DType, ModelOptions, ModelSpec, Offload, Precision, StateOver,
    StepOptions,
};
use hsdp_sharding::MemoryPlan;
use hsdp_tests::support::models::computing_in;
use hsdp_tests::support::worlds::on_ranks;

use super::super::apart::is_apart;
use super::training::{Trainer, Training, spec};
use super::{DEVICE, placed};

/// The peaks of two steps, and what was planned, by category and rank.
fn peaks(spec: &ModelSpec, options: &ModelOptions) -> Vec<([ByteCount; 10], [ByteCount; 10])> {
    memory::reset_peaks();
    let begin = StepOptions::default();
    on_ranks(options.mesh.world_size(), |world| {
        let mut training = Training::with(world, spec.clone(), options, Trainer::AdamW, begin)?;
        training.run(2)?;
        let rank = training.model.rank();
        let measured = Category::COUNTED.map(|it| memory::usage_on_device(rank, it).peak);
        let plan = training.model.plan();
        let optimizer = plan.optimizer_state(rank);
        let shard = plan.masters(rank);
        let planned = MemoryPlan { shard, optimizer, ..plan.memory_on_device(Offload::None) };
        Ok((measured, in_order(&planned)))
    })
}

fn in_order(plan: &MemoryPlan) -> [ByteCount; 10] {
    let MemoryPlan { shard, gather_input, full, grad_full, partial, optimizer, update, buffers } =
        *plan;
    let [snapshot, load] = [ByteCount::ZERO; 2];
    [shard, gather_input, full, grad_full, partial, optimizer, update, buffers, snapshot, load]
}

#[test]
#[ignore = "needs a CUDA device"]
fn peaks_on_a_device_are_as_planned() {
    if !is_apart("steps::planned_memory::peaks_on_a_device_are_as_planned") {
        return;
    }
    for accumulation in Accumulation::ALL {
        let of_model: &[Option<DType>] = &[None];
        let several: &[Option<DType>] = &[None, Some(DType::F32), Some(DType::F16)];
        for (mesh, parameters, dtypes) in [
            ([1, 1], DType::F32, of_model),
            ([1, 3], DType::BF16, of_model),
            ([2, 2], DType::F32, of_model),
            ([4, 1], DType::F16, of_model),
            ([2, 2], DType::BF16, several),
        ] {
            for (prefetch, state) in
                [(0, StateOver::World), (1, StateOver::Shards), (3, StateOver::World)]
            {
                let precision = Precision { parameters, ..Precision::default() };
                let on = placed(DEVICE, mesh);
                let options = ModelOptions { accumulation, precision, prefetch, state, ..on };
                let spec = computing_in(&spec(), dtypes);
                for (rank, (measured, planned)) in peaks(&spec, &options).into_iter().enumerate() {
                    let names = Category::COUNTED.map(|category| category.to_string());
                    assert_eq!(measured, planned, "{names:?} of rank {rank}, {options:?}");
                }
            }
        }
    }
}
