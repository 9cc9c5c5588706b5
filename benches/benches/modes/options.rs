//! The command line.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use hsdp::testing::SlowChannel;
use hsdp::{Accumulation, Channel, Mesh, ModelOptions};
use hsdp_benches::program::check_threads;
use hsdp_benches::steps::{GradientCount, StepsSize};
use hsdp_train::Failure;
use hsdp_train::memory::Limit;

/// Measures a step in each of the three accumulation modes, over memory and over artificially slow
/// links.
#[derive(Clone, Debug, Parser)]
#[command(name = "modes")]
pub(crate) struct Options {
    /// The mesh, replicate x shard. Ranks are threads.
    #[arg(long, default_value = "2x2")]
    pub(crate) mesh: Mesh,
    /// The number of units, all of one size; at most 10000.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) units: u32,
    /// The number of elements of a unit.
    #[arg(long, default_value_t = 2_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) numel: u32,
    /// The numbers of microbatches in a step, each at most 65536; a step is measured for each of
    /// them.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8",
        value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) microbatches: Vec<u32>,
    /// The number of worlds of each mode, by turns; at most 10000. Each world measures a step for
    /// each number of microbatches.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rounds: u32,
    /// The latency of slow links, on both axes, in microseconds; at most 1000000.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    latency_us: u64,
    /// The speed of a slow link of the shard axis, in megabytes a second.
    #[arg(long, default_value = "10000")]
    shard_mb_s: NonZeroU64,
    /// The speed of a slow link of the replicate axis, in megabytes a second; by default about a
    /// quarter of 10 Gb Ethernet.
    #[arg(long, default_value = "300")]
    replicate_mb_s: NonZeroU64,
    /// Also predict the steps over slow links.
    #[arg(long)]
    pub(crate) predict: bool,
    /// The file into which the times are drawn, as SVG.
    #[arg(long)]
    pub(crate) plot: Option<PathBuf>,
    /// Run a short version that only checks that the bench works: its numbers mean nothing.
    #[arg(long)]
    smoke: bool,
    /// An option that `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The links of the collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    /// As fast as this machine's memory.
    Memory,
    /// As slow as in the options: the time is injected, there is no network.
    Slow,
}

impl Options {
    /// Checks that the ranks may be threads, and that the memory of the largest mode is within that
    /// of this process.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        check_threads(self.mesh)?;
        let model =
            ModelOptions { accumulation: Accumulation::Local, ..ModelOptions::on(self.mesh) };
        Ok(self.size().need(&model)?.check(Limit::of_process())?)
    }

    /// The size of a step of one microbatch.
    pub(crate) fn size(&self) -> StepsSize {
        let Self { units, numel, .. } = *self;
        StepsSize { units, numel, microbatches: 1, gradients: GradientCount::OneForAll }
    }

    /// The options, with small sizes for `--smoke`.
    pub(crate) fn scaled(self) -> Self {
        if !self.smoke {
            return self;
        }
        Self { numel: 20_000, microbatches: vec![1, 2], rounds: 1, ..self }
    }

    /// The channels that are slow.
    pub(crate) fn slow(&self, links: Links) -> Vec<SlowChannel> {
        let latency = Duration::from_micros(self.latency_us);
        let slow = |channel, mb_s: NonZeroU64| SlowChannel {
            channel,
            latency,
            bytes_per_second: Some(mb_s.saturating_mul(MEGA)),
        };
        match links {
            Links::Memory => Vec::new(),
            Links::Slow => vec![
                slow(Channel::Gather, self.shard_mb_s),
                slow(Channel::Reduce, self.shard_mb_s),
                slow(Channel::AllReduce, self.replicate_mb_s),
            ],
        }
    }

    /// The slow links, in words.
    pub(crate) fn words(&self) -> String {
        format!(
            "{} us and {} MB/s along a row, {} MB/s along a column",
            self.latency_us, self.shard_mb_s, self.replicate_mb_s
        )
    }
}

const MEGA: NonZeroU64 = NonZeroU64::new(1_000_000).expect("it is not 0");
