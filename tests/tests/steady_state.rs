//! After its first steps, training allocates no buffer: what it asks the allocator for does not grow with the parameters.
//!
//! Counters are of the whole process, so this file has one test.

use std::sync::Arc;

use hsdp::memory::{self, Allocations, CountingAllocator};
use hsdp::{
    Accumulation, AdamW, AdamWOptions, DType, Error, FullCopies, GradientValues, LossSum,
    ModelOptions, ModelSpec, Optimizer, Param, Precision, ShardedModel, StepOptions, Unit, UnitId,
};
use hsdp_comm::{Channel, Tag};
use hsdp_tests::support::worlds::{mesh, on_ranks};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const RANKS: usize = 4;
const UNITS: usize = 6;
const MICROBATCHES: usize = 3;

/// Parameters of a unit: large enough for workers, and for any buffer of them to stand out.
const NUMEL: usize = 400_000;

/// Steps before anything is counted, and those that are counted.
const WARM_UP: usize = 3;
const COUNTED: usize = 4;

/// What a rank may ask for in each unit of each microbatch, for two gathers and a reduction, or in mode `Every` three
/// operations: their descriptors, the boxes in which members meet, lists of blocks. In bytes, and in pieces.
const BOOKKEEPING: u64 = 4 << 10;
const PIECES: u64 = 36;

#[test]
fn a_step_allocates_no_buffer() {
    let mut table = String::new();
    for accumulation in Accumulation::ALL {
        for (parameters, full_copies) in [
            (DType::F32, FullCopies::PerRank),
            (DType::F32, FullCopies::PerProcess),
            (DType::BF16, FullCopies::PerRank),
        ] {
            let precision = Precision { parameters, wire: parameters, ..Precision::default() };
            let on = ModelOptions::on(mesh(2, 2));
            let options = ModelOptions { accumulation, precision, full_copies, ..on };
            let Allocations { count, bytes } = steady(&options);
            let places = (COUNTED * MICROBATCHES * UNITS * RANKS) as u64;
            let line = format!(
                "{accumulation}, {parameters}, {full_copies}: {} bytes in {} allocations",
                bytes.get() / places,
                count / places
            );
            table += &format!("{line}\n");
            assert!(bytes.get() < BOOKKEEPING * places, "for a unit, microbatch and rank: {line}");
            assert!(count < PIECES * places, "for a unit, microbatch and rank: {line}");
        }
    }
    println!("{table}");
    // Not even the smallest buffer, of one unit once a step, would be lost in the bookkeeping.
    let least = (NUMEL / 2 / 2 * size_of::<u16>()) as u64;
    let allowed = BOOKKEEPING * (MICROBATCHES * UNITS) as u64;
    assert!(least > allowed, "{least} bytes would not stand out from {allowed}");
}

/// What all ranks allocate in the counted steps.
fn steady(options: &ModelOptions) -> Allocations {
    let counts = on_ranks(RANKS, |world| {
        let mut training = Training::new(world, options)?;
        for _ in 0..WARM_UP {
            training.step()?;
        }
        let before = training.meet()?;
        for _ in 0..COUNTED {
            training.step()?;
        }
        Ok(training.meet()?.since(before))
    });
    // Ranks look when all have come; the greatest has seen everything.
    counts.into_iter().max_by_key(|seen| seen.bytes).expect("there are ranks")
}

struct Training {
    model: ShardedModel,
    adamw: AdamW,
    gradient: Arc<dyn GradientValues>,
}

impl Training {
    fn new(world: hsdp::World, options: &ModelOptions) -> Result<Self, Error> {
        let unit = |index| {
            Unit::new(format!("unit.{index}")).param(Param::new(format!("w.{index}"), [NUMEL]))
        };
        let spec = (0..UNITS).map(unit).fold(ModelSpec::new(), ModelSpec::unit);
        let model =
            ShardedModel::new(world, spec, options.clone(), |param| vec![0.5; param.numel()])?;
        let adamw = AdamW::new(&model, AdamWOptions::default());
        Ok(Self { model, adamw, gradient: Arc::new(vec![0.25_f32; NUMEL]) })
    }

    fn step(&mut self) -> Result<(), Error> {
        let mut step = self.model.begin_step(StepOptions::microbatches(MICROBATCHES))?;
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

    /// What the process has allocated when all ranks are here.
    fn meet(&self) -> Result<Allocations, Error> {
        let group = self.model.world().world_group(Channel::User);
        group.barrier(Tag::default())?.wait()?;
        let seen = memory::allocations();
        group.barrier(Tag::default())?.wait()?;
        Ok(seen)
    }
}
