//! The cost of an update by each optimizer, beside that of AdamW: the measured time, and the
//! planned bytes of state and bytes that a rank receives, of the rank with the most.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench updates
//! ```
//!
//! The model has the shapes of the layers of a transformer. Only the update is timed: gradients are
//! there before it, and slices are gathered after it, where replicas divide state.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use hsdp::kernels::EIGHT_BIT_BLOCK;
use hsdp::{
    Adafactor, AdafactorOptions, AdamW, AdamWOptions, Error, Gradients, Lion, LionOptions, LossSum,
    Mesh, ModelOptions, ModelSpec, Muon, MuonOptions, Optimizer, Param, Plan, Sgd, SgdOptions,
    ShardedModel, State, StateOver, StepOptions, Unit, UnitGradients, World, WorldOptions,
};
use hsdp_benches::program;
use hsdp_benches::times::median;
use hsdp_train::{Failure, print};

/// Measures an update by each optimizer.
#[derive(Clone, Debug, Parser)]
#[command(name = "updates")]
struct Options {
    /// The mesh, replicate x shard.
    #[arg(long, default_value = "1x2")]
    mesh: Mesh,
    /// The ranks over which state is divided: shards or world.
    #[arg(long, default_value = "shards")]
    state_over: StateOver,
    /// The width of the model, a multiple of 4.
    #[arg(long, default_value_t = 1024, value_parser = width)]
    width: u32,
    /// The number of layers; at most 1000.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    layers: u32,
    /// The number of measured updates of each optimizer, after one that makes its state; at most
    /// 10000.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: u32,
    /// Run a short version that only checks that the bench works: its numbers mean nothing.
    #[arg(long)]
    smoke: bool,
    /// An option that `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A width of a transformer: a multiple of 4, from 4 to 16384.
fn width(text: &str) -> Result<u32, String> {
    let width = text.parse().ok().filter(|width: &u32| (4..=16_384).contains(width));
    let width = width.filter(|width| width.is_multiple_of(4));
    width.ok_or_else(|| "it must be a multiple of 4, from 4 to 16384".to_owned())
}

/// An optimizer, with the declaration of its state.
#[derive(Clone, Copy, Debug)]
struct Kind {
    name: &'static str,
    state: fn(&Param) -> State,
    make: fn(&ShardedModel) -> Box<dyn Optimizer>,
}

/// In the order of the table. The first is what others are compared with.
const KINDS: [Kind; 7] = [
    Kind {
        name: "AdamW",
        state: |_| State::Elements(2),
        make: |model| Box::new(AdamW::new(model, AdamWOptions::default())),
    },
    Kind {
        name: "SGD",
        state: |_| State::Elements(0),
        make: |model| Box::new(Sgd::new(model, SgdOptions::default())),
    },
    Kind {
        name: "SGD with momentum",
        state: |_| State::Elements(1),
        make: |model| {
            Box::new(Sgd::new(model, SgdOptions { momentum: 0.9, ..SgdOptions::default() }))
        },
    },
    Kind {
        name: "Lion",
        state: |_| State::Elements(1),
        make: |model| Box::new(Lion::new(model, LionOptions::default())),
    },
    Kind {
        name: "AdamW, 8 bits",
        state: |_| State::EightBit { block: EIGHT_BIT_BLOCK },
        make: |model| Box::new(AdamW::with_eight_bit_state(model, AdamWOptions::default())),
    },
    Kind {
        name: "Adafactor",
        state: |_| State::Factored,
        make: |model| Box::new(Adafactor::new(model, AdafactorOptions::default())),
    },
    Kind {
        name: "Muon",
        state: |_| State::Muon,
        make: |model| Box::new(Muon::new(model, MuonOptions::default())),
    },
];

fn main() -> ExitCode {
    program::run(|options: Options| measure(&options.scaled()))
}

impl Options {
    fn scaled(self) -> Self {
        if self.smoke { Self { width: 64, layers: 1, repeat: 2, ..self } } else { self }
    }

    fn with(&self) -> ModelOptions {
        ModelOptions { state: self.state_over, ..ModelOptions::on(self.mesh) }
    }

    /// Layers of attention and a perceptron, matrices alone.
    fn spec(&self, kind: Kind) -> ModelSpec {
        let width = self.width as usize;
        let layer = |index: u32| {
            let of = |name: &str, shape| {
                Param::new(format!("{index}.{name}"), shape).blocks(EIGHT_BIT_BLOCK)
            };
            Unit::new(format!("layer-{index}"))
                .param(of("qkv", [3 * width, width]))
                .param(of("out", [width, width]))
                .param(of("up", [4 * width, width]))
                .param(of("down", [width, 4 * width]))
        };
        let layers = (0..self.layers).map(layer);
        layers.fold(ModelSpec::new(), ModelSpec::unit).updated_by(kind.state)
    }
}

/// The numbers of an optimizer.
struct Measured {
    /// Seconds of an update, on the slowest rank.
    seconds: f64,
    /// Planned bytes of state for each element, on the rank with the most.
    state: f64,
    /// Planned bytes that the busiest rank receives in an update, for each element of its shard.
    received: f64,
}

fn measure(options: &Options) -> Result<(), Failure> {
    program::check_threads(options.mesh)?;
    let all: Vec<(Kind, Measured)> = KINDS
        .into_iter()
        .map(|kind| Ok::<_, Failure>((kind, measured(options, kind)?)))
        .collect::<Result<_, _>>()?;
    let width = options.width;
    let layers = options.layers;
    let mesh = options.mesh;
    print(format!(
        "{layers} layers of width {width} on {mesh}, state over {}; an update, medians of {}",
        options.state_over, options.repeat
    ))?;
    print(format!(
        "{:<18} {:>10} {:>8} {:>16} {:>18}",
        "optimizer", "ms", "times", "state, planned", "received, planned"
    ))?;
    for (kind, Measured { seconds, state, received }) in &all {
        let ms = 1e3 * seconds;
        let times = seconds / all[0].1.seconds;
        print(format!("{:<18} {ms:>10.2} {times:>8.2} {state:>16.2} {received:>18.2}", kind.name))?;
    }
    Ok(())
}

fn measured(options: &Options, kind: Kind) -> Result<Measured, Failure> {
    let rank = |world| seconds(world, options, kind);
    let ranks = hsdp::launch(options.mesh.world_size(), WorldOptions::default(), rank);
    let ranks: Vec<f64> = ranks.into_iter().collect::<Result<_, _>>().map_err(Failure::work)?;
    let with = options.with().plan_options();
    let plan = Plan::new(options.spec(kind), options.mesh, with).map_err(Failure::input)?;
    let shard: usize = plan.layouts().iter().map(|layout| layout.shard_len()).sum();
    let received = options.mesh.ranks().map(|rank| plan.update(rank).flow().bytes).max();
    let of_element = |bytes: u64| bytes as f64 / shard as f64;
    Ok(Measured {
        seconds: ranks.into_iter().fold(0.0, f64::max),
        state: of_element(plan.memory().optimizer.get()),
        received: of_element(received.unwrap_or_default().get()),
    })
}

/// The time of an update on this rank.
fn seconds(world: World, options: &Options, kind: Kind) -> Result<f64, Error> {
    let with = options.with();
    let initial = |param: &Param| values(param.numel());
    let mut model = ShardedModel::new(world, options.spec(kind), with, initial)?;
    let mut optimizer = (kind.make)(&model);
    let mut times = Vec::new();
    for _ in 0..=options.repeat {
        let gradients = gradients(&mut model)?;
        let began = Instant::now();
        optimizer.step(&mut model, gradients)?;
        times.push(began.elapsed());
    }
    Ok(median(&times[1..]).as_secs_f64())
}

/// Values without a pattern, from -0.5 to 0.5.
fn values(len: usize) -> Vec<f32> {
    let value = |index: u32| index.wrapping_mul(2_654_435_761) >> 8;
    (0..u32::MAX).take(len).map(|index| value(index) as f32 / (1 << 24) as f32 - 0.5).collect()
}

fn gradients(model: &mut ShardedModel) -> Result<Gradients, Error> {
    let spec = model.plan().spec().clone();
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let mut pass = step.microbatch()?;
    for unit in spec.unit_ids() {
        drop(pass.unshard(unit)?);
    }
    let _ = pass.loss(LossSum::new(1.0, 1))?;
    for unit in spec.unit_ids().rev() {
        drop(pass.unshard(unit)?);
        let gradients = spec[unit].params.iter().map(|param| values(param.numel()));
        pass.reduce(unit, UnitGradients::of(gradients))?;
    }
    pass.finish()?;
    step.finish()
}
