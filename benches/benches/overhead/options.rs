//! What is measured.

use clap::{Parser, ValueEnum};

/// Measures what the runtime itself takes: a unit, many ranks, a large plan.
#[derive(Clone, Debug, Parser)]
#[command(name = "overhead")]
pub(crate) struct Options {
    /// What to measure; may be given several times. All by default.
    #[arg(long, value_enum)]
    pub(crate) only: Vec<Subject>,
    /// Units of one element each, of the steps whose parts are measured.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) units: u32,
    /// Microbatches of such a step.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) microbatches: u32,
    /// Such steps that are measured, after one that is not.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,
    /// Parameters in a unit where 64 ranks are compared with 256.
    #[arg(long, default_value_t = 262_144, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) numel: u32,
    /// Worlds of 64 and of 256 ranks, by turns, on each mesh.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Units that are planned, of twelve parameters each.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) planned_units: u32,
    /// Little of everything, to see that it runs: the numbers mean nothing.
    #[arg(long)]
    smoke: bool,
    /// What `cargo bench` says to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One of the three things that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Subject {
    /// What a unit of one element costs in a microbatch.
    Units,
    /// A step of 256 ranks beside one of 64.
    Ranks,
    /// A plan of many units for 1,024 ranks.
    Plan,
}

impl Options {
    /// The options, made small where only a look is wanted.
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
