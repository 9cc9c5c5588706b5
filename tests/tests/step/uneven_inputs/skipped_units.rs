//! Ranks that differ within a microbatch: they skip units, run their backward in another order, or
//! have no backward, no loss, or nothing to do. Every rank takes part in every collective all the
//! same, so no rank waits for another, and each gradient is the sum over the ranks that bring one.

use hsdp::{
    Accumulation, Error, LossSum, ModelOptions, ModelSpec, Objective, Pass, ShardedModel,
    StepOptions, UnitGradients, World,
};
use hsdp_tests::support::handmade::in_f32;
use hsdp_tests::support::models::{layer, unit};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

const UNITS: usize = 6;
const MICROBATCHES: usize = 2;

/// The part of a microbatch that a rank does.
#[derive(Clone, Copy, Debug)]
enum Share {
    /// Units forward, loss, units backward.
    All,
    /// The same without one unit.
    Without(usize),
    /// The backward in the order of the forward.
    BackwardInForwardOrder,
    /// A loss of weight 0 after the forward, and no backward.
    NoBackward,
    /// A loss of weight 0 and nothing else.
    OnlyLoss,
    /// Nothing at all, not even a loss.
    Nothing,
}

const SHARES: [Share; 5] = [
    Share::Without(UNITS - 2),
    Share::BackwardInForwardOrder,
    Share::NoBackward,
    Share::OnlyLoss,
    Share::Nothing,
];

impl Share {
    fn weight(self) -> u64 {
        u64::from(!matches!(self, Self::NoBackward | Self::OnlyLoss | Self::Nothing))
    }

    fn forward(self) -> Vec<usize> {
        match self {
            Self::All | Self::BackwardInForwardOrder | Self::NoBackward => (0..UNITS).collect(),
            Self::Without(skipped) => (0..UNITS).filter(|unit| *unit != skipped).collect(),
            Self::OnlyLoss | Self::Nothing => Vec::new(),
        }
    }

    fn backward(self) -> Vec<usize> {
        match self {
            Self::All | Self::Without(_) => self.forward().into_iter().rev().collect(),
            Self::BackwardInForwardOrder => self.forward(),
            Self::NoBackward | Self::OnlyLoss | Self::Nothing => Vec::new(),
        }
    }

    /// Does its share; every element that it reduces has the derivative 1.
    fn run(self, mut pass: Pass<'_>) -> Result<(), Error> {
        for index in self.forward() {
            let _ = pass.unshard(unit(index))?;
        }
        if matches!(self, Self::Nothing) {
            return pass.finish();
        }
        let seed = pass.loss(LossSum::new(0.0, self.weight()))?;
        for index in self.backward() {
            let full = pass.unshard(unit(index))?;
            let gradient = |param| vec![in_f32(seed.value()); full.values(param).len()];
            let count = pass.handle().plan().spec()[unit(index)].params.len();
            let gradients = UnitGradients::of((0..count).map(gradient));
            drop(full);
            pass.reduce(unit(index), gradients)?;
        }
        pass.finish()
    }
}

#[test]
fn one_rank_may_differ_from_the_others_in_every_mode() {
    for accumulation in Accumulation::ALL {
        for share in SHARES {
            for odd in 0..4 {
                let options = ModelOptions { accumulation, ..ModelOptions::on(mesh(2, 2)) };
                expect_sums(&options, StepOptions::microbatches(MICROBATCHES), |rank| {
                    if rank == odd { share } else { Share::All }
                });
            }
        }
    }
}

#[test]
fn all_ranks_may_differ_from_each_other() {
    let shares =
        [Share::NoBackward, Share::Without(0), Share::BackwardInForwardOrder, Share::Nothing];
    for accumulation in Accumulation::ALL {
        for prefetch in [0, 1, 3] {
            for microbatches in [Some(MICROBATCHES), None] {
                for objective in [Objective::WeightedMean, Objective::Sum] {
                    let options = ModelOptions {
                        accumulation,
                        prefetch,
                        objective,
                        ..ModelOptions::on(mesh(2, 2))
                    };
                    let step = StepOptions { microbatches, ..StepOptions::default() };
                    expect_sums(&options, step, |rank| shares[rank]);
                }
            }
        }
    }
}

/// Two steps, so that both the step in which ranks ask each other for weights and one in which they
/// need not are seen.
fn expect_sums(options: &ModelOptions, begin: StepOptions, share: impl Fn(usize) -> Share + Sync) {
    let ranks = options.mesh.world_size();
    let gradients = common(on_ranks(ranks, |world| {
        let share = share(world.rank().index());
        let mut model = model(world, options)?;
        for last in [false, true] {
            let mut step = model.begin_step(begin)?;
            for _ in 0..MICROBATCHES {
                share.run(step.microbatch()?)?;
            }
            let gradients = step.finish()?;
            if last {
                return gradients.full(&model);
            }
        }
        unreachable!("the second step is the last")
    }));
    let shares: Vec<Share> = (0..ranks).map(share).collect();
    let weight: u64 = shares.iter().map(|share| share.weight()).sum();
    for index in 0..UNITS {
        let with = shares.iter().filter(|share| share.backward().contains(&index)).count();
        let divisor = match options.objective {
            Objective::Sum => 1.0,
            _ => count(weight) * 2.0,
        };
        let expected = count(with as u64) * 2.0 / divisor;
        for name in [format!("layer.{index}.weight"), format!("layer.{index}.bias")] {
            let off = gradients[&name]
                .iter()
                .find(|element| (f64::from(**element) - expected).abs() > 1e-6);
            assert_eq!(off, None, "{name}, expected {expected}: {shares:?} with {options:?}");
        }
    }
}

fn count(count: u64) -> f64 {
    u32::try_from(count).expect("a small count").into()
}

fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    let units = (0..UNITS).map(|index| layer(&format!("layer.{index}"), [9, 5 + index]));
    let spec = units.fold(ModelSpec::new(), ModelSpec::unit);
    springs::model_of(world, &spec, options)
}
