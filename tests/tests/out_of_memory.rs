//! A rank that has no memory for a buffer: it and all others end the step, and go on with the next when there is some.
//!
//! Budgets are per rank and process, so the tests of this file run one at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hsdp::memory::{self, Category, CountingAllocator};
use hsdp::{
    Accumulation, Error, ModelOptions, Optimizer, Rank, Sgd, SgdOptions, ShardedModel, StepOptions,
    World,
};
use hsdp_sharding::ByteCount;
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Held by the test that is running.
static TURN: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Trains two steps; in the first, and in no other, rank 1 may hold no more than nothing in `category`. Returns the
/// error of each rank.
fn trained(category: Category, options: &ModelOptions) -> Vec<String> {
    let outcomes = on_ranks(4, |world| {
        let rank = world.rank();
        let mut model = model(world, options)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let nothing = (rank == Rank::new(1)).then_some(ByteCount(0));
        memory::set_budget(rank, category, nothing);
        let told = step(&mut model, &mut sgd).expect_err("rank 1 has no memory");
        assert!(!told.is_fatal(), "{told}");
        memory::set_budget(rank, category, None);
        step(&mut model, &mut sgd)?;
        Ok((told.to_string(), model.full_parameters()?))
    });
    let (told, parameters): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
    let untouched = common(on_ranks(4, |world| {
        let mut model = model(world, options)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        step(&mut model, &mut sgd)?;
        model.full_parameters()
    }));
    assert_eq!(common(parameters), untouched, "the failed step left no trace");
    told
}

fn step(model: &mut ShardedModel, sgd: &mut Sgd) -> Result<(), Error> {
    let rank = model.rank().index();
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    springs::microbatch(&mut step, Batch::of(rank, 0, 0))?;
    let gradients = step.finish()?;
    sgd.step(model, gradients).map(drop)
}

fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, three_units(), options.clone(), springs::initial)
}

fn assert_told(told: &[String], expected: &str) {
    for (rank, told) in told.iter().enumerate() {
        match rank {
            1 => assert_eq!(told, expected),
            _ => assert_eq!(told, &format!("step 0 aborted by rank 1: {expected}")),
        }
    }
}

#[test]
fn there_is_no_memory_for_a_gather() {
    let _turn = alone();
    let told = trained(Category::Full, &ModelOptions::on(mesh(2, 2)));
    assert_told(
        &told,
        "gather of unit first on rank 1, step 0: out of memory: cannot allocate 364 bytes",
    );
}

#[test]
fn there_is_no_memory_for_a_partial() {
    let _turn = alone();
    let told = trained(Category::Partial, &ModelOptions::on(mesh(2, 2)));
    assert_told(
        &told,
        "reduction of unit third on rank 1, step 0: out of memory: cannot allocate 256 bytes",
    );
}

#[test]
fn there_is_no_memory_for_an_unsharded_gradient() {
    let _turn = alone();
    let local = Accumulation::Local;
    let told = trained(
        Category::GradFull,
        &ModelOptions { accumulation: local, ..ModelOptions::on(mesh(2, 2)) },
    );
    assert_told(
        &told,
        "accumulation of unit third on rank 1, step 0: out of memory: cannot allocate 372 bytes",
    );
}
