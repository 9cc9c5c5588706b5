//! A model whose computation is a sleep, on channels that are slow, and how long a step of it
//! takes.

use std::thread;
use std::time::{Duration, Instant};

use hsdp::testing::SlowChannel;
use hsdp::{
    Channel, Error, LossSum, ModelOptions, ModelSpec, Optimizer, Pass, Sgd, SgdOptions,
    ShardedModel, StateOver, StepOptions, UnitGradients, UnitId, World, WorldOptions,
};
use hsdp_tests::support::models::layer;
use hsdp_tests::support::springs;

/// The unit of time: the duration of a slow operation, and of a computation.
pub(crate) const TICK: Duration = Duration::from_millis(20);

pub(crate) const UNITS: u32 = 8;

/// A step that is measured.
#[derive(Clone, Debug)]
pub(crate) struct Timed {
    pub(crate) options: ModelOptions,
    pub(crate) begin: StepOptions,
    pub(crate) microbatches: u32,
    /// The channels that are slow: how many ticks an operation of each takes.
    pub(crate) slow: Vec<(Channel, u32)>,
    /// Ticks that a unit computes in the forward, and in the backward.
    pub(crate) compute: [u32; 2],
}

impl Timed {
    /// How many ticks a step takes: the least of three, since a busy machine only adds to it.
    pub(crate) fn ticks(&self) -> f64 {
        let slow = self.slow.iter().map(|(channel, ticks)| SlowChannel {
            channel: *channel,
            latency: TICK * *ticks,
            bytes_per_second: None,
        });
        let options = WorldOptions { slow: slow.collect(), ..WorldOptions::default() };
        let ranks = self.options.mesh.world_size();
        let ran = hsdp::launch(ranks, options, |world| self.run(world));
        let least = ran.into_iter().map(|rank| rank.expect("it trains"));
        least.max().expect("there is a rank").as_secs_f64() / TICK.as_secs_f64()
    }

    fn run(&self, world: World) -> Result<Duration, Error> {
        let units = (0..UNITS).map(|index| layer(&format!("layer.{index}"), [9, 7]));
        let spec = units.fold(ModelSpec::new(), ModelSpec::unit);
        let mut model = ShardedModel::new(world, spec, self.options.clone(), springs::initial)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        // A first step has no slices to wait for.
        self.step(&mut model, &mut sgd)?;
        let steps = (0..3).map(|_| self.step(&mut model, &mut sgd));
        let times: Vec<Duration> = steps.collect::<Result<_, _>>()?;
        Ok(times.into_iter().min().expect("three steps"))
    }

    /// Measures a step, with its update where replicas divide state: slices are gathered while the
    /// next step begins.
    fn step(&self, model: &mut ShardedModel, sgd: &mut Sgd) -> Result<Duration, Error> {
        let units: Vec<UnitId> = model.plan().spec().unit_ids().collect();
        let started = Instant::now();
        let mut step = model.begin_step(self.begin)?;
        for _ in 0..self.microbatches {
            self.microbatch(step.microbatch()?, &units)?;
        }
        let gradients = step.finish()?;
        if self.options.state == StateOver::World {
            sgd.step(model, gradients)?;
        }
        Ok(started.elapsed())
    }

    fn microbatch(&self, mut pass: Pass<'_>, units: &[UnitId]) -> Result<(), Error> {
        let [forward, backward] = self.compute;
        for unit in units {
            let full = pass.unshard(*unit)?;
            compute(forward);
            drop(full);
        }
        let _ = pass.loss(LossSum::new(1.0, 1))?;
        for unit in units.iter().rev() {
            let full = pass.unshard(*unit)?;
            compute(backward);
            let gradient = |param| vec![1.0_f32; full.values(param).len()];
            let count = pass.handle().plan().spec()[*unit].params.len();
            let gradients = UnitGradients::of((0..count).map(gradient));
            drop(full);
            pass.reduce(*unit, gradients)?;
        }
        pass.finish()
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a computation that needs no core, and takes its time"
)]
fn compute(ticks: u32) {
    thread::sleep(TICK * ticks);
}

/// Asserts that a step takes as many ticks as expected, at least, and less than `slack` more.
#[track_caller]
pub(crate) fn expect_ticks(timed: &Timed, expected: u32, slack: u32) {
    let ticks = timed.ticks();
    let range = f64::from(expected)..f64::from(expected + slack);
    assert!(
        range.contains(&ticks),
        "a step took {ticks:.2} ticks, expected {expected} and less than {slack} more: {timed:?}"
    );
}
