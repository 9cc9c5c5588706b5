//! The times of the steps, and the plan's figures for them.

use std::fmt;
use std::time::{Duration, Instant};

use hsdp::{
    Accumulation, ByteCount, Channel, Error, ModelOptions, Rank, Sgd, SgdOptions, StateOver, Tag,
    World, WorldOptions, launch,
};
use hsdp_benches::steps::Steps;
use hsdp_benches::times::median;
use hsdp_sharding::{Plan, PlanOptions, Traffic};

use crate::options::{Links, Options};

/// Steps of a world before those that are measured.
const WARM_UP: usize = 2;

/// When gradients are reduced, and over which ranks state is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    pub(crate) accumulation: Accumulation,
    pub(crate) state: StateOver,
}

impl Mode {
    /// All that are measured.
    pub(crate) const ALL: [Self; 4] = [
        Self::over_shards(Accumulation::ReduceScatter),
        Self::over_shards(Accumulation::Every),
        Self::over_shards(Accumulation::Local),
        Self { accumulation: Accumulation::ReduceScatter, state: StateOver::World },
    ];

    const fn over_shards(accumulation: Accumulation) -> Self {
        Self { accumulation, state: StateOver::Shards }
    }

    /// The options of its plans.
    pub(crate) fn plan_options(self) -> PlanOptions {
        let Self { accumulation, state } = self;
        PlanOptions { accumulation, state, ..PlanOptions::default() }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.state {
            StateOver::Shards => self.accumulation.fmt(f),
            state => write!(f, "{}, state over {state}", self.accumulation),
        }
    }
}

/// One mode with one number of microbatches.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) mode: Mode,
    pub(crate) microbatches: u32,
    /// Of a step, the median; over memory, and over slow links.
    pub(crate) memory: Duration,
    pub(crate) slow: Duration,
    /// What rank 0 receives in a step, by the plan.
    pub(crate) traffic: Traffic,
    /// Bytes of partial sums that a rank holds, by the plan.
    pub(crate) partial: ByteCount,
    pub(crate) grad_full: ByteCount,
}

/// All of them, by the number of microbatches and then by mode.
pub(crate) fn rows(options: &Options) -> Result<Vec<Row>, String> {
    let cells = options.microbatches.len();
    // By mode, links, and number of microbatches.
    let mut times = Mode::ALL.map(|_| [vec![Vec::new(); cells], vec![Vec::new(); cells]]);
    for _ in 0..options.rounds {
        for (mode, times) in Mode::ALL.into_iter().zip(&mut times) {
            for (links, times) in [Links::Memory, Links::Slow].into_iter().zip(times) {
                let measured = steps_of_a_world(options, mode, links)?;
                times.iter_mut().zip(measured).for_each(|(times, time)| times.push(time));
            }
        }
    }
    let mut rows = Vec::new();
    for (cell, microbatches) in options.microbatches.iter().enumerate() {
        for (mode, [memory, slow]) in Mode::ALL.into_iter().zip(&times) {
            let [memory, slow] = [memory, slow].map(|times| median(&times[cell]));
            rows.push(row(options, mode, *microbatches, [memory, slow])?);
        }
    }
    Ok(rows)
}

fn row(
    options: &Options,
    mode: Mode,
    microbatches: u32,
    [memory, slow]: [Duration; 2],
) -> Result<Row, String> {
    let plan = Plan::new(options.size().spec(), options.mesh, mode.plan_options());
    let plan = plan.map_err(|error| error.to_string())?;
    let traffic = plan.traffic(Rank::new(0), microbatches.into());
    let held = plan.memory();
    Ok(Row {
        mode,
        microbatches,
        memory,
        slow,
        traffic,
        partial: held.partial,
        grad_full: held.grad_full,
    })
}

/// What rank 0 measures of a world: a step of each number of microbatches.
fn steps_of_a_world(
    options: &Options,
    Mode { accumulation, state }: Mode,
    links: Links,
) -> Result<Vec<Duration>, String> {
    let model = ModelOptions { accumulation, state, ..ModelOptions::on(options.mesh) };
    let world_options = WorldOptions { slow: options.slow(links), ..WorldOptions::default() };
    let ran = launch(options.mesh.world_size(), world_options, |world| {
        let mut steps = Steps::new(world.clone(), options.size(), model.clone())?;
        let mut sgd = Sgd::new(steps.model(), SgdOptions::default());
        // These touch pages.
        for _ in 0..WARM_UP {
            steps.train(&mut sgd)?;
        }
        let timed = |microbatches: &u32| timed(&world, &mut steps, &mut sgd, *microbatches);
        options.microbatches.iter().map(timed).collect::<Result<Vec<_>, Error>>()
    });
    let of_rank_0 = ran.into_iter().next().ok_or("no ranks")?;
    of_rank_0.map_err(|error| error.to_string())
}

/// A step with its update, from one meeting of all ranks to the next. The slices of an update are
/// gathered in the next step.
fn timed(
    world: &World,
    steps: &mut Steps,
    sgd: &mut Sgd,
    microbatches: u32,
) -> Result<Duration, Error> {
    let group = world.world_group(Channel::User);
    let meet = || Ok::<_, Error>(group.barrier(Tag::default())?.wait()?);
    steps.set_microbatches(microbatches);
    meet()?;
    let started = Instant::now();
    steps.train(sgd)?;
    meet()?;
    Ok(started.elapsed())
}
