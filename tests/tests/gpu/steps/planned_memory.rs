//! The memory that a model holds on a device, by category, against the plan's formulas.

use hsdp::memory::{self, Category};
use hsdp::{Accumulation, ByteCount, DType, ModelOptions, Offload, Precision, StepOptions};
use hsdp_sharding::MemoryPlan;
use hsdp_tests::support::worlds::on_ranks;

use super::super::apart::is_apart;
use super::training::{Trainer, Training};
use super::{DEVICE, placed};

/// The peaks of two steps, and what was planned, by category and rank.
fn peaks(options: &ModelOptions) -> Vec<([ByteCount; 8], [ByteCount; 8])> {
    memory::reset_peaks();
    let how = (Trainer::AdamW, StepOptions::default());
    on_ranks(options.mesh.world_size(), |world| {
        let mut training = Training::new(world, options, how)?;
        training.run(2)?;
        let rank = training.model.rank();
        let measured = Category::COUNTED.map(|it| memory::usage_on_device(rank, it).peak);
        let plan = training.model.plan();
        let optimizer = plan.optimizer_state(rank);
        let planned = MemoryPlan { optimizer, ..plan.memory_on_device(Offload::None) };
        Ok((measured, in_order(&planned)))
    })
}

fn in_order(plan: &MemoryPlan) -> [ByteCount; 8] {
    let MemoryPlan { shard, gather_input, full, grad_full, partial, optimizer, update } = *plan;
    [shard, gather_input, full, grad_full, partial, optimizer, update, ByteCount::ZERO]
}

#[test]
#[ignore = "needs a CUDA device"]
fn peaks_on_a_device_are_as_planned() {
    if !is_apart("steps::planned_memory::peaks_on_a_device_are_as_planned") {
        return;
    }
    for accumulation in Accumulation::ALL {
        for (mesh, parameters) in [
            ([1, 1], DType::F32),
            ([1, 3], DType::BF16),
            ([2, 2], DType::F32),
            ([4, 1], DType::F16),
        ] {
            for prefetch in [0, 1, 3] {
                let precision = Precision { parameters, ..Precision::default() };
                let on = placed(DEVICE, mesh);
                let options = ModelOptions { accumulation, precision, prefetch, ..on };
                for (rank, (measured, planned)) in peaks(&options).into_iter().enumerate() {
                    let names = Category::COUNTED.map(|category| category.to_string());
                    assert_eq!(measured, planned, "{names:?} of rank {rank}, {options:?}");
                }
            }
        }
    }
}
