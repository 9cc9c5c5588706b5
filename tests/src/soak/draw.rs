//! A random world: mesh, options, length, and faults.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use hsdp::{
    Accumulation, DType, DynamicScale, FullCopies, LossScaling, Mesh, ModelOptions, ModelSpec,
    NonFinite, Objective, Precision, Rank, StateOver, Uneven,
};
use hsdp_comm::{Between, Fault, FaultKind, FaultPlace, Stage};
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::support::models::{layer, three_units, unit};

/// How many units the model has.
pub(super) const UNITS: usize = 3;

/// One world of the soak.
#[derive(Clone, Debug)]
pub struct Trial {
    pub(super) options: ModelOptions,
    pub(super) between: Between,
    pub(super) optimizer: Recipe,
    /// By rank: for how many steps it has data.
    pub(super) data: Vec<u64>,
    pub(super) width: Width,
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

/// How large units are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// All of their work is done by the rank that comes last.
    Narrow,
    /// The work of one of them goes to workers.
    Wide,
}

/// A wide model takes its time.
const MOST_STEPS_OF_WIDE: u64 = 6;

/// Whether a step is begun with its number of microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Count {
    Given,
    AsManyAsCome,
}

impl Trial {
    /// The world that follows from `seed`. Its ranks have full copies of their own where they
    /// exchange messages.
    #[must_use]
    pub fn of(seed: u64, between: Between) -> Self {
        let random = &mut ChaCha8Rng::seed_from_u64(seed);
        let mesh = mesh(random);
        let width = if random.random_ratio(1, 8) { Width::Wide } else { Width::Narrow };
        let steps =
            random.random_range(1..=if width == Width::Wide { MOST_STEPS_OF_WIDE } else { 40 });
        let microbatches = random.random_range(1..=3);
        let faults = random.random_range(0..=3);
        let faults: Vec<Fault> = (0..faults).map(|_| fault(mesh, steps, random)).collect();
        let mut options = options(mesh, &faults, random);
        if between == Between::Messages {
            options.full_copies = FullCopies::PerRank;
        }
        Self {
            options,
            between,
            optimizer: pick(random, &[Recipe::AdamW, Recipe::Momentum]),
            data: data(mesh, steps, random),
            width,
            microbatches,
            count: pick(random, &[Count::Given, Count::AsManyAsCome]),
            faults,
        }
    }

    pub(super) fn spec(&self) -> ModelSpec {
        match self.width {
            Width::Narrow => three_units(),
            Width::Wide => ModelSpec::new()
                .unit(layer("first", [13, 7]))
                .unit(layer("second", [150, 200]))
                .unit(layer("third", [31, 3])),
        }
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { options, between, optimizer, data, width, microbatches, count, faults } = self;
        let ModelOptions {
            mesh,
            accumulation,
            full_copies,
            state,
            precision,
            loss_scaling,
            uneven,
            compare_replicas,
            ..
        } = options;
        write!(
            f,
            "{mesh}, {between:?}, {accumulation}, {full_copies}, state over {state}, \
             {precision:?}, {loss_scaling:?}, {optimizer:?}, {width:?}, replicas compared: \
             {compare_replicas:?}, steps by rank {data:?} ({uneven:?}) of {microbatches} \
             microbatches, {count:?}; faults:",
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

/// Often all ranks have the same; else each has its own, which may be nothing.
fn data(mesh: Mesh, steps: u64, random: &mut ChaCha8Rng) -> Vec<u64> {
    let is_even = random.random_ratio(2, 3);
    let of_rank = |_| if is_even { steps } else { random.random_range(0..=steps) };
    (0..mesh.world_size()).map(of_rank).collect()
}

fn options(mesh: Mesh, faults: &[Fault], random: &mut ChaCha8Rng) -> ModelOptions {
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let parameters = pick(random, &dtypes);
    let wire = pick(random, &dtypes);
    let objective = pick(random, &[Objective::WeightedMean, Objective::RankMean, Objective::Sum]);
    // A mean over ranks has no place for a rank without data.
    let uneven = match objective {
        Objective::RankMean => pick(random, &[Uneven::Error, Uneven::Stop]),
        _ => pick(random, &[Uneven::Error, Uneven::Stop, Uneven::ZeroWeight]),
    };
    let every = |steps| NonZeroU64::new(steps);
    let full_copies = pick(random, &FullCopies::ALL);
    let state = match full_copies {
        FullCopies::PerRank => pick(random, &StateOver::ALL),
        FullCopies::PerProcess => StateOver::Shards,
    };
    ModelOptions {
        loss_scaling: loss_scaling(wire, faults, random),
        uneven,
        compare_replicas: pick(random, &[None, None, every(1), every(3)]),
        precision: Precision { parameters, wire, ..Precision::default() },
        accumulation: pick(random, &Accumulation::ALL),
        prefetch: random.random_range(0..=2),
        full_copies,
        state,
        objective,
        non_finite: pick(random, &[NonFinite::Abort, NonFinite::Skip]),
        ..ModelOptions::on(mesh)
    }
}

/// A power of two changes no bit where the wire has the range of f32. An f16 wire rounds small
/// numbers otherwise under another scale, and a value that is not finite would leave the scale
/// lower than it is in the run without faults.
fn loss_scaling(wire: DType, faults: &[Fault], random: &mut ChaCha8Rng) -> LossScaling {
    let initial = pick(random, &[1024.0, 65536.0]);
    let growth_interval = pick(random, &[1, 2, 5]);
    let dynamic = DynamicScale { initial, growth_interval, ..DynamicScale::default() };
    let scaling =
        pick(random, &[LossScaling::Off, LossScaling::Fixed(8.0), LossScaling::Dynamic(dynamic)]);
    let changes_scale = |fault: &Fault| matches!(fault.kind, FaultKind::NonFinite(_));
    let rounds_otherwise = wire == DType::F16 && faults.iter().any(changes_scale);
    if rounds_otherwise { LossScaling::Off } else { scaling }
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
        2 => {
            let stages = [Stage::AllReduce, Stage::ScatterSums, Stage::GatherSlices];
            (unit, pick(random, &stages)).into()
        }
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
