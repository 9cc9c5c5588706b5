//! A step over time: its order, with the costs of its actions. SIMULATOR.md, "Times" and "Ranks
//! that are alike".

mod actions;
mod colors;
mod meetings;
mod repetition;
mod schedules;

#[cfg(test)]
mod tests;

use std::ops::{Add, Mul};

use hsdp_flight::Stage;
use hsdp_sharding::Rank;

pub(crate) use self::colors::Colors;
pub(crate) use self::meetings::{STREAMS, stream};

#[cfg(test)]
pub(crate) use self::actions::actions_done;
use self::actions::{ColorRanks, SimulatedWorld};
use self::repetition::{Repetition, components};
use crate::host::{Members, ModelPlacement, Order, StepBlock, StepOperation, Work};
use crate::{Error, Time};

/// The time of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// From the beginning of the step, the same on all ranks, to the end of the last update. If
    /// replicas divide state, from the statement before the update to the next one.
    pub step: Time,
    /// Times of the ranks of each color, in order of their first ranks.
    pub ranks: Vec<RankTiming>,
}

/// The time of the ranks of one color.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankTiming {
    /// The first of them.
    pub first: Rank,
    /// Their number.
    pub count: usize,
    /// From the beginning of the step to the end of their update, or to the statement.
    pub step: Time,
    /// Where this time goes.
    pub shares: Shares,
}

/// Simulates a step.
///
/// # Errors
/// [`Error::Stuck`] if the order waits for an operation before it issues it.
pub fn simulate(order: &Order, costs: &dyn Costs) -> Result<Timing, Error> {
    simulate_among(order, costs, Colors::of_order(order, costs))
}

/// Simulates a step of ranks whose colors are known.
///
/// # Errors
/// The errors of [`simulate`].
pub(crate) fn simulate_among(
    order: &Order,
    costs: &dyn Costs,
    colors: Colors,
) -> Result<Timing, Error> {
    Simulation::new(order, costs, colors, None).run()
}

/// Simulates a step, and returns all that each color does, besides: so no microbatch is skipped.
///
/// # Errors
/// The errors of [`simulate`].
pub fn trace(order: &Order, costs: &dyn Costs) -> Result<(Timing, Vec<Span>), Error> {
    let colors = Colors::of_order(order, costs);
    let mut simulation = Simulation::new(order, costs, colors, Some(Vec::new()));
    let timing = simulation.run()?;
    Ok((timing, simulation.world.spans.take().unwrap_or_default()))
}

impl Colors {
    fn of_order(order: &Order, costs: &dyn Costs) -> Self {
        Self::of(order.mesh, &|members, first| costs.shape(members, first))
    }
}

struct Simulation<'a> {
    order: &'a Order,
    world: SimulatedWorld<'a>,
}

impl<'a> Simulation<'a> {
    fn new(
        order: &'a Order,
        costs: &'a dyn Costs,
        colors: Colors,
        spans: Option<Vec<Span>>,
    ) -> Self {
        let world = SimulatedWorld {
            mesh: order.mesh,
            placement: order.placement,
            costs,
            ranks: ColorRanks::new(&colors),
            colors,
            spans,
        };
        Self { order, world }
    }

    fn run(&mut self) -> Result<Timing, Error> {
        for block in &self.order.blocks {
            self.block(block)?;
        }
        let colors = &self.world.colors;
        let of_color = |color: usize| {
            let rank = &self.world.ranks.of[color];
            let first = colors.first(color);
            let count = colors.count(color);
            RankTiming { first, count, step: rank.end(), shares: rank.shares }
        };
        let ranks: Vec<RankTiming> = (0..colors.len()).map(of_color).collect();
        let step = ranks.iter().map(|rank| rank.step).max().unwrap_or(Time::ZERO);
        Ok(Timing { step, ranks })
    }

    /// Simulates all times of a block. As soon as one leaves the state of the one before, the
    /// others are skipped.
    fn block(&mut self, block: &StepBlock) -> Result<(), Error> {
        let components = components(&self.world.colors, block);
        let mut before: Option<Repetition> = None;
        for done in 1..=block.times {
            self.world.run(block, block.microbatch + done - 1)?;
            let after = Repetition::of(&self.world.ranks, &components);
            match before.filter(|before| self.world.spans.is_none() && before.repeats(&after)) {
                Some(before) => {
                    self.world.ranks.skip(&before, &after, block.times - done);
                    return Ok(());
                }
                None => before = Some(after),
            }
        }
        Ok(())
    }
}

/// A level of links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Within a machine.
    Machine,
    /// Between machines.
    Network,
}

/// The cost of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCost {
    /// Time of a member's host: the call, and on a host the member's part of the work.
    pub host: Time,
    /// From the moment at which all members are ready to the end.
    pub link: Time,
    /// The time for which a member's links carry its bytes, by level.
    pub busy: [Time; 2],
}

/// The cost of computation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCost {
    /// Time of the host: the launches, and where the model is in host memory all the work.
    pub host: Time,
    /// Time of the device.
    pub device: Time,
}

/// The costs of actions on a machine.
pub trait Costs {
    /// Returns a number that is the same for groups on which each operation has the same costs.
    /// `first` is the first member of the group.
    fn shape(&self, members: Members, first: Rank) -> usize;

    /// Returns the cost of an operation of a group of this shape.
    fn operation(&self, operation: &StepOperation, shape: usize) -> OperationCost;

    /// Returns the cost of computation on a rank.
    fn work(&self, work: Work) -> WorkCost;
}

/// The resource that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// The rank's thread, which computes where the model is in host memory.
    Host,
    /// The stream of computation of a device.
    Computation,
    /// A stream of collectives, by number.
    Collectives(usize),
}

impl Lane {
    /// Returns its name, where the model lies in this memory.
    #[must_use]
    pub const fn name(self, placement: ModelPlacement) -> &'static str {
        match (self, placement) {
            (Self::Host, _) => "host",
            (Self::Computation, _) => "computation",
            (Self::Collectives(0), _) => "exchanges",
            (Self::Collectives(4), _) => "statistics",
            (Self::Collectives(_), ModelPlacement::Device) => "collectives",
            (Self::Collectives(1), _) => "gathers",
            (Self::Collectives(2), _) => "reductions",
            (Self::Collectives(_), _) => "all-reduces",
        }
    }
}

/// A use of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Computation.
    Work(Work),
    /// The launch of computation on a device.
    Launch(Work),
    /// An operation, from the time at which all members are ready.
    Operation(StepOperation),
    /// The thread's part of an operation: the call, and in host memory its part of the work.
    Issue(StepOperation),
    /// Waiting for an operation.
    Wait(StepOperation),
}

/// The activity of the ranks of a color from one time to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The color.
    pub color: usize,
    /// The resource.
    pub lane: Lane,
    /// Its use.
    pub what: What,
    /// The microbatch, from 0.
    pub microbatch: u64,
    /// From this time on.
    pub begins: Time,
    /// Until this time.
    pub ends: Time,
    /// Waiting for members that are late: the time before an operation since this color was ready,
    /// or the part of a wait.
    pub late: Time,
}

impl Span {
    /// Returns whether it takes time, or is one of those that are there even if they take none.
    fn is_shown(&self) -> bool {
        matches!(self.what, What::Work(_) | What::Operation(_)) || self.begins < self.ends
    }
}

/// A part of a step's time. The parts of a rank add up to the time of its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Share {
    /// Forward, backward, loss, and the accumulation of gradients.
    Computation,
    /// The device waits for the host, which launches kernels and issues operations.
    Host,
    /// Gathers that computation waits for, those of slices among them; where the model is in host
    /// memory, also the thread's part of them.
    Gathers,
    /// Reduce-scatters that computation waits for, likewise: of gradients, and of sums.
    Reductions,
    /// All-reduces that computation waits for, likewise.
    AllReduces,
    /// The norm and the update.
    Optimizer,
    /// Exchanges on the control channel, and sums of statistics.
    Exchanges,
    /// Waiting for ranks that are late.
    Waiting,
}

impl Share {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Computation,
        Self::Host,
        Self::Gathers,
        Self::Reductions,
        Self::AllReduces,
        Self::Optimizer,
        Self::Exchanges,
        Self::Waiting,
    ];

    /// Returns its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Computation => "computation",
            Self::Host => "host",
            Self::Gathers => "exposed gathers",
            Self::Reductions => "exposed reductions",
            Self::AllReduces => "exposed all-reduces",
            Self::Optimizer => "optimizer",
            Self::Exchanges => "exchanges",
            Self::Waiting => "waiting",
        }
    }

    /// Returns the share of a wait for an operation of this stage.
    const fn of(stage: Stage) -> Self {
        match stage {
            Stage::Gather | Stage::GatherSlices => Self::Gathers,
            Stage::Reduce | Stage::ScatterSums => Self::Reductions,
            Stage::AllReduce => Self::AllReduces,
            _ => Self::Exchanges,
        }
    }

    /// Returns the share of computation.
    const fn of_work(work: Work) -> Self {
        match work {
            Work::Norm | Work::Update | Work::UpdateSlice(_) => Self::Optimizer,
            _ => Self::Computation,
        }
    }
}

/// The time of each share, and the time for which a rank's links are busy, by level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Times of the shares, then of the links by [`Level`].
    times: [Time; Share::ALL.len() + 2],
}

impl Shares {
    /// Returns the time of a share.
    #[must_use]
    pub fn of(&self, share: Share) -> Time {
        self.times[share as usize]
    }

    /// Returns the time for which the rank's links carry bytes.
    pub(crate) fn busy(&self, level: Level) -> Time {
        self.times[Share::ALL.len() + level as usize]
    }

    /// Adds the time for which the rank's links carry bytes, by level.
    fn carry(&mut self, busy: [Time; 2]) {
        self.times[Share::ALL.len()..].iter_mut().zip(busy).for_each(|(time, it)| *time += it);
    }

    fn add(&mut self, share: Share, time: Time) {
        self.times[share as usize] += time;
    }

    /// Returns the times since `earlier`.
    fn since(&self, earlier: &Self) -> Self {
        let since = |index: usize| self.times[index].saturating_sub(earlier.times[index]);
        Self { times: std::array::from_fn(since) }
    }
}

impl Add for Shares {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { times: std::array::from_fn(|index| self.times[index] + other.times[index]) }
    }
}

impl Mul<u64> for Shares {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self { times: self.times.map(|time| time * times) }
    }
}
