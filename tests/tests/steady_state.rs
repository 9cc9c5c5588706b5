//! After its first steps, training allocates no buffer: what a step still allocates is small, and
//! does not grow with the model.
//!
//! A buffer that is allocated in each step costs a pass over its memory, since the system zeroes
//! it. The operations of a step, and their lists, are small.
//!
//! Counters are of the whole process, so this file has one test.

use std::fmt;
use std::sync::{Arc, Mutex};

use hsdp::memory::{self, CountingAllocator};
use hsdp::{
    Accumulation, AdamW, AdamWOptions, DType, Error, FullCopies, GradientValues, Group, LossSum,
    ModelOptions, ModelSpec, Optimizer, Param, Precision, ShardedModel, StateOver, StepOptions,
    Unit, UnitId,
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

/// Steps that are counted together; more of those that are quick, so that what is allocated now and
/// then is seen, too.
const COUNTED: usize = 4;
const COUNTED_SMALL: usize = 24;

/// How often the steps of the smaller model are counted: the least number counts.
const TIMES: usize = 3;

/// How often those of the larger model are counted at the most. How much is in use at once depends
/// on which thread runs when: a step in which it is more than ever before still allocates for that.
/// What every step allocates, it allocates each time.
const ATTEMPTS: usize = 50;

/// Allocations of a rank for each unit and microbatch, at the most: of a gather in the forward, one
/// in the backward, a reduce-scatter, their operations, and the list of gradients that this test
/// hands over.
const MOST: u64 = 60;

/// A model and the options with which it is trained.
struct Case {
    options: ModelOptions,
    numel: usize,
    steps: StepOptions,
}

#[test]
fn a_step_allocates_no_buffer() {
    let given = StepOptions::microbatches(MICROBATCHES);
    let per_rank = FullCopies::PerRank;
    let [shards, world] = StateOver::ALL;
    let plain = [(DType::F32, per_rank, shards, given), (DType::F32, per_rank, world, given)];
    let all = [
        (DType::F32, per_rank, shards, given),
        (DType::F32, per_rank, shards, StepOptions::as_many_as_come()),
        (DType::F32, FullCopies::PerProcess, shards, given),
        (DType::BF16, per_rank, shards, given),
        (DType::F32, per_rank, world, given),
        (DType::BF16, per_rank, world, given),
    ];
    for (mesh, numel, kinds) in [
        (mesh(2, 2), LARGE, &all[..]),
        (mesh(2, 2), SMALL, &all),
        (mesh(1, 1), SMALL, &all),
        (mesh(4, 1), LARGE, &plain),
        (mesh(2, 8), LARGE, &plain),
        // Where shards of neighbors are put together.
        (mesh(1, 20), LARGE, &plain),
    ] {
        for accumulation in Accumulation::ALL {
            for &(parameters, full_copies, state, steps) in kinds {
                let precision = Precision { parameters, wire: parameters, ..Precision::default() };
                let on = ModelOptions::on(mesh);
                let options = ModelOptions { accumulation, precision, full_copies, state, ..on };
                Case { options, numel, steps }.check();
            }
        }
    }
}

impl Case {
    fn counted(&self) -> usize {
        if self.numel <= 2 * SMALL { COUNTED_SMALL } else { COUNTED }
    }

    /// Twice the elements.
    fn larger(&self) -> Self {
        Self { options: self.options.clone(), numel: 2 * self.numel, steps: self.steps }
    }

    /// A model of twice the size allocates less more than the parts of one rank grow, of all units,
    /// in the dtype that takes the fewest bytes: its shards, or its slices of them. And what it
    /// allocates are few pieces.
    fn check(&self) {
        let counts = self.count(|counts| counts.len() == TIMES);
        let [count, bytes] = least(&counts);
        let ranks = self.options.mesh.world_size();
        let most = (self.counted() * MICROBATCHES * UNITS * ranks) as u64 * MOST;
        assert!(count <= most, "{self}: {count} allocations, at most {most}");
        let parts = match self.options.state {
            StateOver::Shards => self.options.mesh.shard_size(),
            StateOver::World => ranks,
        };
        let part = self.numel / parts * DType::BF16.size_bytes();
        let limit = bytes + (self.counted() * UNITS * part) as u64;
        let counts = self.larger().count(|counts| {
            counts.len() == ATTEMPTS || counts.last().is_some_and(|[_, bytes]| *bytes < limit)
        });
        let [_, larger] = least(&counts);
        assert!(larger < limit, "{self}: {bytes} bytes, and {larger} for twice the elements");
    }

    /// How many pieces, and bytes of them, all ranks allocate in so many steps, counted again and
    /// again until it is `enough`.
    fn count(&self, enough: impl Fn(&[[u64; 2]]) -> bool + Sync) -> Vec<[u64; 2]> {
        let counts = Mutex::new(Vec::with_capacity(ATTEMPTS));
        on_ranks(self.options.mesh.world_size(), |world| {
            let mut training = Training::new(world, self)?;
            training.step(self.steps)?;
            let mut before = training.meet(memory::allocations)?;
            loop {
                for _ in 0..self.counted() {
                    training.step(self.steps)?;
                }
                before = training.meet(|| {
                    let now = memory::allocations();
                    if training.all.index() == 0 {
                        let since = now.since(before);
                        let counted = [since.count, since.bytes.get()];
                        counts.lock().expect("nobody panics").push(counted);
                    }
                    now
                })?;
                if enough(&counts.lock().expect("nobody panics")) {
                    return Ok(());
                }
            }
        });
        counts.into_inner().expect("nobody panics")
    }
}

/// The least number of pieces, and of bytes.
fn least(counts: &[[u64; 2]]) -> [u64; 2] {
    [0, 1].map(|of| counts.iter().map(|count| count[of]).min().expect("it was counted"))
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ModelOptions { mesh, accumulation, precision, full_copies, state, .. } = &self.options;
        let numel = self.numel;
        let microbatches = self.steps.microbatches;
        let counted = self.counted();
        write!(
            f,
            "{mesh}, {numel} elements, {accumulation}, {}, {full_copies}, state over {state}, {microbatches:?} microbatches, {counted} steps",
            precision.parameters
        )
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
                pass.reduce(unit, [Some(Arc::clone(&self.gradient))].into_iter().collect())?;
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
