//! The command line.

use std::path::PathBuf;

use clap::Parser;
use hsdp::Mesh;
use hsdp_benches::steps::{GradientCount, StepsSize};

/// Measures how long training waits for a save in the background.
#[derive(Clone, Debug, Parser)]
#[command(name = "checkpoint")]
pub(crate) struct Options {
    /// The mesh, replicate x shard.
    #[arg(long, default_value = "2x2")]
    pub(crate) mesh: Mesh,
    /// The number of units, each with one parameter; at most 10000.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) units: u32,
    /// The number of elements of a parameter.
    #[arg(long, default_value_t = 2_097_152, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) numel: u32,
    /// The number of measured saves, after a first one that is reported separately because its
    /// memory is fresh; at most 1000000.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) repeat: u32,
    /// The folder in which the bench makes a folder of checkpoints, which it removes at the end; by
    /// default the system's folder for temporary files.
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// Run a short version that only checks that the bench works: its numbers mean nothing.
    #[arg(long)]
    smoke: bool,
    /// An option that `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    pub(crate) fn size(&self) -> StepsSize {
        let Self { units, numel, .. } = *self;
        StepsSize { units, numel, microbatches: 1, gradients: GradientCount::OneForAll }
    }

    /// The options, with small sizes for `--smoke`.
    pub(crate) fn scaled(self) -> Self {
        if self.smoke { Self { numel: 4096, repeat: 2, ..self } } else { self }
    }
}
