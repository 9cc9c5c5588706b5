//! After its first steps, training asks the allocator for nothing.
//!
//! Counters are of the whole process, so this file has one test.

use std::sync::{Arc, Mutex};

use hsdp::memory::{self, CountingAllocator};
use hsdp::{
    Accumulation, AdamW, AdamWOptions, DType, Error, FullCopies, GradientValues, Group, LossSum,
    ModelOptions, ModelSpec, Optimizer, Param, Precision, ShardedModel, StepOptions, Unit, UnitId,
};
use hsdp_comm::{Channel, Tag};
use hsdp_tests::support::worlds::{mesh, on_ranks};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const UNITS: usize = 6;
const MICROBATCHES: usize = 3;

/// Parameters of a unit: large enough for workers, and, on few ranks, small enough for none.
const LARGE: usize = 60_000;
const SMALL: usize = 500;

/// Steps that are counted together; more of those that are quick, so that what is allocated now and then is seen, too.
const COUNTED: usize = 4;
const COUNTED_SMALL: usize = 60;

/// How often they are counted at the most. How much is in use at once depends on which thread runs when: a step in which it is more
/// than ever before still allocates for that. What every step allocates, it allocates each time.
const ATTEMPTS: usize = 50;

/// A model and the options with which it is trained.
struct Case {
    options: ModelOptions,
    numel: usize,
    steps: StepOptions,
}

#[test]
fn a_step_allocates_nothing() {
    let given = StepOptions::microbatches(MICROBATCHES);
    for (mesh, numel) in [
        (mesh(2, 2), LARGE),
        (mesh(2, 2), SMALL),
        (mesh(1, 1), SMALL),
        (mesh(4, 1), LARGE),
        (mesh(2, 8), LARGE),
        // Where shards of neighbors are put together.
        (mesh(1, 20), LARGE),
    ] {
        for accumulation in Accumulation::ALL {
            for (parameters, full_copies, steps) in [
                (DType::F32, FullCopies::PerRank, given),
                (DType::F32, FullCopies::PerRank, StepOptions::as_many_as_come()),
                (DType::F32, FullCopies::PerProcess, given),
                (DType::BF16, FullCopies::PerRank, given),
            ] {
                let precision = Precision { parameters, wire: parameters, ..Precision::default() };
                let on = ModelOptions::on(mesh);
                let options = ModelOptions { accumulation, precision, full_copies, ..on };
                let case = Case { options, numel, steps };
                let (counts, made) = (case.counts(), case.own_lists());
                assert!(
                    counts.contains(&made),
                    "{mesh}, {numel} elements, {accumulation}, {parameters}, {full_copies}, {:?} microbatches: \
                     {counts:?} allocations in {} steps, of which {made} are lists of this test",
                    steps.microbatches,
                    case.counted(),
                );
            }
        }
    }
}

impl Case {
    fn counted(&self) -> usize {
        if self.numel == SMALL { COUNTED_SMALL } else { COUNTED }
    }

    /// The lists of gradients that this test hands over, one for each unit, microbatch and rank, are its own.
    fn own_lists(&self) -> u64 {
        (self.counted() * MICROBATCHES * UNITS * self.options.mesh.world_size()) as u64
    }

    /// How much all ranks allocate in so many steps, counted again and again until it is no more than what this test makes.
    fn counts(&self) -> Vec<u64> {
        let counts = Mutex::new(Vec::with_capacity(ATTEMPTS));
        on_ranks(self.options.mesh.world_size(), |world| {
            let mut training = Training::new(world, self)?;
            let mut before = training.meet(memory::allocations)?;
            loop {
                for _ in 0..self.counted() {
                    training.step(self.steps)?;
                }
                before = training.meet(|| {
                    let now = memory::allocations();
                    if training.all.index() == 0 {
                        counts.lock().expect("nobody panics").push(now.since(before).count);
                    }
                    now
                })?;
                let counts = counts.lock().expect("nobody panics");
                if counts.len() == ATTEMPTS || counts.last() == Some(&self.own_lists()) {
                    return Ok(());
                }
            }
        });
        counts.into_inner().expect("nobody panics")
    }
}

struct Training {
    model: ShardedModel,
    adamw: AdamW,
    gradient: Arc<dyn GradientValues>,
    all: Group,
}

impl Training {
    fn new(world: hsdp::World, case: &Case) -> Result<Self, Error> {
        let numel = case.numel;
        let all = world.world_group(Channel::User);
        let unit = |index| {
            Unit::new(format!("unit.{index}")).param(Param::new(format!("w.{index}"), [numel]))
        };
        let spec = (0..UNITS).map(unit).fold(ModelSpec::new(), ModelSpec::unit);
        let model =
            ShardedModel::new(world, spec, case.options.clone(), |param| vec![0.5; param.numel()])?;
        let adamw = AdamW::new(&model, AdamWOptions::default());
        let adamw = adamw.group(
            |param| param.name == "w.0",
            |options| AdamWOptions { weight_decay: 0.0, ..options },
        );
        Ok(Self { model, adamw, gradient: Arc::new(vec![0.25_f32; numel]), all })
    }

    fn step(&mut self, options: StepOptions) -> Result<(), Error> {
        let mut step = self.model.begin_step(options)?;
        for _ in 0..MICROBATCHES {
            let mut pass = step.microbatch()?;
            for unit in (0..UNITS).map(UnitId::new) {
                drop(pass.unshard(unit)?);
            }
            let _ = pass.loss(LossSum::new(1.0, 1))?;
            for unit in (0..UNITS).rev().map(UnitId::new) {
                drop(pass.unshard(unit)?);
                pass.reduce(unit, vec![Some(Arc::clone(&self.gradient))])?;
            }
            pass.finish()?;
        }
        let gradients = step.finish()?.clip(1.0);
        self.adamw.step(&mut self.model, gradients).map(drop)
    }

    /// Calls `say` when all ranks are here, and before any goes on.
    fn meet<T>(&self, say: impl FnOnce() -> T) -> Result<T, Error> {
        self.all.barrier(Tag::default())?.wait()?;
        let said = say();
        self.all.barrier(Tag::default())?.wait()?;
        Ok(said)
    }
}
