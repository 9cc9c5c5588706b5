//! The command line.

use clap::{Parser, ValueEnum};

/// Measures the time of the runtime itself: for a unit, for many ranks, for a large plan.
#[derive(Clone, Debug, Parser)]
#[command(name = "overhead")]
pub(crate) struct Options {
    /// The subject to measure; repeat the option for more; all by default.
    #[arg(long, value_enum)]
    pub(crate) only: Vec<Subject>,
    /// The number of units of one element, in the steps whose parts are measured; at most 10000.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) units: u32,
    /// The number of microbatches in such a step; at most 65536.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) microbatches: u32,
    /// The number of such steps, after one that is not measured; at most 1000000.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) repeat: u32,
    /// The number of elements of a unit, in the comparison of 256 ranks with 64.
    #[arg(long, default_value_t = 262_144, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) numel: u32,
    /// The number of worlds of 64 and of 256 ranks, by turns, on each mesh; at most 10000.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rounds: u32,
    /// The number of units in the plan, each with twelve parameters; at most 100000.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) planned_units: u32,
    /// Run a short version that only checks that the bench works: its numbers mean nothing.
    #[arg(long)]
    smoke: bool,
    /// An option that `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One of the three things that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Subject {
    /// The time of a unit of one element in a microbatch.
    Units,
    /// A step of 256 ranks beside one of 64.
    Ranks,
    /// A plan of many units for 1,024 ranks.
    Plan,
}

impl Options {
    /// The options, with small sizes for `--smoke`.
    pub(crate) fn scaled(self) -> Self {
        if !self.smoke {
            return self;
        }
        Self { microbatches: 4, repeat: 3, numel: 1024, rounds: 1, planned_units: 500, ..self }
    }

    pub(crate) fn measures(&self, subject: Subject) -> bool {
        self.only.is_empty() || self.only.contains(&subject)
    }
}
