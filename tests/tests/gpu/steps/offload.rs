//! Models of which a part is in host memory: they train to the same bits as those on the host, and
//! hold what the plan says, there and here.

use hsdp::memory::{self, Category};
use hsdp::{
    Accumulation, ByteCount, DType, Error, ModelOptions, Offload, Param, Precision, StateOver,
    StepOptions, Unit, World,
};
use hsdp_sharding::MemoryPlan;
use hsdp_tests::support::models::computing_in;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::on_ranks;

use super::super::apart::is_apart;
use super::bits::{PLAIN, TRAINERS, compare};
use super::training::{self, Trainer, Training};
use super::{offloading, placed};

const WHAT: [Offload; 2] = [Offload::Optimizer, Offload::All];

#[test]
#[ignore = "needs a CUDA device"]
fn what_is_offloaded_trains_to_the_bits_of_the_host() {
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let mut turn = 0;
    for offload in WHAT {
        for mesh in [[1, 1], [1, 3], [2, 2]] {
            let parameters = dtypes[turn % 3];
            let wire = dtypes[(turn + 1) % 3];
            for state in StateOver::ALL {
                let options = ModelOptions {
                    accumulation: Accumulation::ALL[turn % 3],
                    state,
                    precision: Precision { parameters, wire, output: None },
                    ..placed(offloading(offload), mesh)
                };
                compare(&options, TRAINERS[turn % 4], StepOptions::microbatches(3));
            }
            turn += 1;
        }
    }
}

/// By category: on the device, and on the host.
type Held = [[ByteCount; 6]; 2];

fn in_order(plan: MemoryPlan) -> [ByteCount; 6] {
    let MemoryPlan { shard, gather_input, full, grad_full, partial, optimizer, .. } = plan;
    [shard, gather_input, full, grad_full, partial, optimizer]
}

const CATEGORIES: [Category; 6] = [
    Category::Shard,
    Category::GatherInput,
    Category::Full,
    Category::GradFull,
    Category::Partial,
    Category::Optimizer,
];

/// The peaks of two steps by rank, and what was planned. What is frozen is larger than all else.
fn peaks(options: &ModelOptions, offload: Offload, dtypes: &[Option<DType>]) -> Vec<[Held; 2]> {
    memory::reset_peaks();
    let begin = StepOptions::default();
    let table = Unit::new("table").param(Param::new("table.weight", [300, 100]).frozen());
    on_ranks(options.mesh.world_size(), |world| {
        let spec = computing_in(&training::spec().unit(table.clone()), dtypes);
        let mut training = Training::with(world, spec, options, Trainer::AdamW, begin)?;
        training.run(2)?;
        let rank = training.model.rank();
        let plan = training.model.plan();
        let on_device = CATEGORIES.map(|it| memory::usage_on_device(rank, it).peak);
        let on_host = CATEGORIES.map(|it| memory::usage(rank, it).peak);
        let optimizer = plan.optimizer_state(rank);
        let on_host_planned = MemoryPlan { optimizer, ..plan.memory_offloaded(offload) };
        let mut planned = [plan.memory_on_device(offload), on_host_planned];
        // Masters are those of this rank, where others may have more.
        match offload {
            Offload::All => planned[1].shard = plan.masters_offloaded(rank),
            Offload::None | Offload::Optimizer => planned[0].shard = plan.masters(rank),
        }
        Ok([[on_device, on_host], planned.map(in_order)])
    })
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_is_offloaded_is_on_the_host_and_not_on_the_device() {
    if !is_apart("steps::offload::what_is_offloaded_is_on_the_host_and_not_on_the_device") {
        return;
    }
    for offload in WHAT {
        let several: &[Option<DType>] = &[Some(DType::F32), None, Some(DType::F16)];
        for (parameters, dtypes) in
            [(DType::F32, &[None][..]), (DType::BF16, &[None]), (DType::BF16, several)]
        {
            let on = [[1, 1], [1, 3], [2, 2]].map(|mesh| (mesh, StateOver::Shards));
            for (mesh, state) in on.into_iter().chain([([2, 2], StateOver::World)]) {
                let precision = Precision { parameters, ..Precision::default() };
                let on = placed(offloading(offload), mesh);
                let options = ModelOptions { precision, state, ..on };
                let peaks = peaks(&options, offload, dtypes);
                for (rank, [measured, planned]) in peaks.into_iter().enumerate() {
                    assert_eq!(measured, planned, "{CATEGORIES:?} of rank {rank}, {options:?}");
                    assert_eq!(measured[0][5], ByteCount::ZERO, "no state is on the device");
                }
            }
        }
    }
}

/// Who reads a shard on the host while it is updated there reads what it was.
#[test]
#[ignore = "needs a CUDA device"]
fn a_shard_that_a_user_holds_keeps_its_values() {
    let run = |world: World| -> Result<(), Error> {
        let options = placed(offloading(Offload::All), [1, 1]);
        let mut model = springs::model(world, &options)?;
        let unit = model.plan().reductions()[0];
        let held = model.shard(unit)?;
        let before = held.to_vec();
        let mut sgd = PLAIN.of(&model);
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        springs::microbatch(&mut step, springs::Batch::of(0, 0, 0))?;
        let gradients = step.finish()?;
        sgd.step(&mut model, gradients)?;
        assert_eq!(*held, before);
        assert_ne!(*model.shard(unit)?, before);
        Ok(())
    };
    run(World::single()).expect("a rank alone");
}
