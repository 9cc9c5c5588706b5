//! A step over time: the orders of all ranks, with the costs of their actions. SIMULATOR.md, "Times" and "Ranks that are alike".

mod actions;
mod colors;
mod costs;
mod meetings;
mod repetition;
mod schedules;
mod shares;
mod span;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use hsdp_sharding::{Mesh, Rank};

#[cfg(test)]
pub(crate) use self::actions::actions_done;
use self::actions::{Ranks, World};
pub(crate) use self::colors::Colors;
pub use self::costs::{Costs, Level, OperationCost, WorkCost};
pub(crate) use self::meetings::stream;
use self::repetition::{Dependence, Repetition};
pub use self::schedules::Streams;
pub use self::shares::{Share, Shares};
pub use self::span::{Lane, Span, What};
use crate::host::{Data, Order, Placement};
use crate::{Error, Time};

/// The orders of a step's ranks.
#[derive(Debug)]
pub struct Orders {
    /// The mesh.
    pub mesh: Mesh,
    /// The memory that holds the model.
    pub placement: Placement,
    /// Of a rank with data, and of one without.
    pub of: BTreeMap<Data, Order>,
    /// The ranks without data.
    pub absent: BTreeSet<Rank>,
}

impl Orders {
    pub(crate) fn data(&self, rank: Rank) -> Data {
        if self.absent.contains(&rank) { Data::Absent } else { Data::Present }
    }
}

/// The time of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// From the beginning of the step, the same on all ranks, to the end of the last update.
    pub step: Time,
    /// Of each color: the ranks of this color, in order of their first ranks.
    pub ranks: Vec<RankTiming>,
}

/// The time of the ranks of one color.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankTiming {
    /// The first of them.
    pub first: Rank,
    /// Their number.
    pub count: usize,
    /// From the beginning of the step to the end of their update.
    pub step: Time,
    /// Where this time goes.
    pub shares: Shares,
}

/// Simulates a step.
///
/// # Errors
/// [`Error::Stuck`] if the orders of two ranks have other operations, so that ranks wait for each other.
pub fn simulate(orders: &Orders, costs: &dyn Costs) -> Result<Timing, Error> {
    simulate_among(orders, costs, Colors::of_orders(orders, costs))
}

/// Simulates a step of ranks whose colors are known.
///
/// # Errors
/// The errors of [`simulate`].
pub(crate) fn simulate_among(
    orders: &Orders,
    costs: &dyn Costs,
    colors: Colors,
) -> Result<Timing, Error> {
    Simulation::new(orders, costs, colors, None).run()
}

/// Simulates a step, and returns all that each color does, besides: so no microbatch is skipped.
///
/// # Errors
/// The errors of [`simulate`].
pub fn trace(orders: &Orders, costs: &dyn Costs) -> Result<(Timing, Vec<Span>), Error> {
    let colors = Colors::of_orders(orders, costs);
    let mut simulation = Simulation::new(orders, costs, colors, Some(Vec::new()));
    let timing = simulation.run()?;
    Ok((timing, simulation.world.spans.take().unwrap_or_default()))
}

impl Colors {
    fn of_orders(orders: &Orders, costs: &dyn Costs) -> Self {
        Self::of(orders.mesh, &orders.absent, &|members, first| costs.shape(members, first))
    }
}

struct Simulation<'a> {
    orders: Vec<&'a Order>,
    world: World<'a>,
}

impl<'a> Simulation<'a> {
    fn new(
        orders: &'a Orders,
        costs: &'a dyn Costs,
        colors: Colors,
        spans: Option<Vec<Span>>,
    ) -> Self {
        let order = |color: usize| &orders.of[&orders.data(colors.first(color))];
        let of_colors = (0..colors.len()).map(order).collect();
        let world = World {
            mesh: orders.mesh,
            placement: orders.placement,
            costs,
            ranks: Ranks::new(&colors),
            colors,
            spans,
        };
        Self { orders: of_colors, world }
    }

    fn run(&mut self) -> Result<Timing, Error> {
        for index in 0..self.orders[0].blocks.len() {
            self.block(index)?;
        }
        let colors = &self.world.colors;
        let of_color = |color: usize| {
            let rank = &self.world.ranks.of[color];
            let (first, count) = (colors.first(color), colors.count(color));
            RankTiming { first, count, step: rank.end(), shares: rank.shares }
        };
        let ranks: Vec<RankTiming> = (0..colors.len()).map(of_color).collect();
        let step = ranks.iter().map(|rank| rank.step).max().unwrap_or(Time::ZERO);
        Ok(Timing { step, ranks })
    }

    /// All times of a block: as soon as one leaves the same state as the one before, the others are not simulated.
    fn block(&mut self, index: usize) -> Result<(), Error> {
        let blocks: Vec<_> = self.orders.iter().map(|order| &order.blocks[index]).collect();
        let times = blocks[0].times;
        let dependence = Dependence::of(&self.world.colors, &blocks);
        let mut before: Option<Repetition<'_>> = None;
        for done in 1..=times {
            self.world.run(&blocks, blocks[0].microbatch + done - 1)?;
            let after = Repetition::of(&self.world.ranks, &dependence);
            match before.filter(|before| self.world.spans.is_none() && before.repeats(&after)) {
                Some(before) => {
                    self.world.ranks.skip(&before, &after, times - done);
                    return Ok(());
                }
                None => before = Some(after),
            }
        }
        Ok(())
    }
}
