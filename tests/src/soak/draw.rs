//! A random world: mesh, options, length, and faults.

use std::fmt;
use std::time::Duration;

use hsdp::{Accumulation, DType, Mesh, ModelOptions, NonFinite, Objective, Precision, Rank};
use hsdp_comm::{Fault, FaultKind, FaultPlace, Stage};
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::support::models::unit;

/// How many units the model has.
pub(super) const UNITS: usize = 3;

/// One world of the soak.
#[derive(Clone, Debug)]
pub struct Trial {
    pub(super) options: ModelOptions,
    pub(super) optimizer: Recipe,
    /// Steps to commit.
    pub(super) steps: u64,
    pub(super) microbatches: usize,
    pub(super) count: Count,
    pub(super) faults: Vec<Fault>,
}

/// How a step is updated.
#[derive(Clone, Copy, Debug)]
pub(super) enum Recipe {
    AdamW,
    Momentum,
}

/// Whether a step is begun with its number of microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Count {
    Given,
    AsManyAsCome,
}

impl Trial {
    /// The world that follows from `seed`.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let random = &mut ChaCha8Rng::seed_from_u64(seed);
        let mesh = mesh(random);
        let steps = random.random_range(1..=40);
        let microbatches = random.random_range(1..=3);
        let faults = random.random_range(0..=3);
        Self {
            options: options(mesh, random),
            optimizer: pick(random, &[Recipe::AdamW, Recipe::Momentum]),
            steps,
            microbatches,
            count: pick(random, &[Count::Given, Count::AsManyAsCome]),
            faults: (0..faults).map(|_| fault(mesh, steps, random)).collect(),
        }
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { options, optimizer, steps, microbatches, count, faults } = self;
        write!(
            f,
            "{}, {}, {:?}, {optimizer:?}, {steps} steps of {microbatches} microbatches, {count:?}; faults:",
            options.mesh, options.accumulation, options.precision
        )?;
        faults.iter().try_for_each(|fault| write!(f, " [{fault}]"))
    }
}

fn pick<T: Copy>(random: &mut ChaCha8Rng, choices: &[T]) -> T {
    *choices.choose(random).expect("there is a choice")
}

fn mesh(random: &mut ChaCha8Rng) -> Mesh {
    let meshes = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1), (2, 3), (3, 2)];
    let (replicate, shard) = pick(random, &meshes);
    Mesh::new(replicate, shard).expect("a mesh")
}

fn options(mesh: Mesh, random: &mut ChaCha8Rng) -> ModelOptions {
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let (parameters, wire) = (pick(random, &dtypes), pick(random, &dtypes));
    ModelOptions {
        precision: Precision { parameters, wire, ..Precision::default() },
        accumulation: pick(random, &Accumulation::ALL),
        prefetch: random.random_range(0..=2),
        objective: pick(random, &[Objective::WeightedMean, Objective::RankMean, Objective::Sum]),
        non_finite: pick(random, &[NonFinite::Abort, NonFinite::Skip]),
        ..ModelOptions::on(mesh)
    }
}

fn fault(mesh: Mesh, steps: u64, random: &mut ChaCha8Rng) -> Fault {
    let rank = Rank::new(random.random_range(0..mesh.world_size()));
    let step = random.random_range(0..steps);
    let kind = kind(random);
    let place = match kind {
        // Where a gradient is.
        FaultKind::NonFinite(_) => (unit(random.random_range(0..UNITS)), Stage::Reduce).into(),
        _ => place(random),
    };
    Fault::at(rank, step, place, kind)
}

fn place(random: &mut ChaCha8Rng) -> FaultPlace {
    let unit = unit(random.random_range(0..UNITS));
    match random.random_range(0..6) {
        0 => unit.into(),
        1 => (unit, Stage::Reduce).into(),
        2 => (unit, Stage::AllReduce).into(),
        3 => Stage::Header.into(),
        4 => Stage::Agreement.into(),
        _ => random.random_range(0..30_u64).into(),
    }
}

fn kind(random: &mut ChaCha8Rng) -> FaultKind {
    let delay = Duration::from_micros(random.random_range(0..3000));
    let value = pick(random, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    let kinds = [
        FaultKind::Panic,
        FaultKind::Error,
        FaultKind::Error,
        FaultKind::Leave,
        FaultKind::Delay(delay),
        FaultKind::Delay(delay),
        FaultKind::Freeze,
        FaultKind::WrongOp,
        FaultKind::WrongReduction,
        FaultKind::WrongDType,
        FaultKind::WrongCount,
        FaultKind::WrongRoot,
        FaultKind::SwappedOrder,
        FaultKind::SkippedCall,
        FaultKind::ExtraCall,
        FaultKind::NonFinite(value),
        FaultKind::NonFinite(value),
        FaultKind::OutOfMemory,
        FaultKind::OutOfMemory,
    ];
    pick(random, &kinds)
}
