//! What is measured.

use std::path::PathBuf;

use clap::Parser;
use hsdp::Mesh;

/// Measures for how long a save in the background keeps training waiting.
#[derive(Clone, Debug, Parser)]
#[command(name = "checkpoint")]
pub(crate) struct Options {
    /// Replicas x shards.
    #[arg(long, default_value = "2x2")]
    pub(crate) mesh: Mesh,
    /// Units of one parameter each.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) units: u32,
    /// Elements of each.
    #[arg(long, default_value_t = 2_097_152, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) numel: u32,
    /// Saves that are measured, after one that is told apart: its memory is fresh.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,
    /// Where checkpoints are written, in a folder that is removed in the end; the system's folder for such things by default.
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// Little of everything, to see that it runs: the numbers mean nothing.
    #[arg(long)]
    smoke: bool,
    /// What `cargo bench` says to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    /// The options, made small where only a look is wanted.
    pub(crate) fn scaled(self) -> Self {
        if self.smoke { Self { numel: 4096, repeat: 2, ..self } } else { self }
    }
}
