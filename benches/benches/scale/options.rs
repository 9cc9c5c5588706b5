//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use hsdp_benches::program::check_threads;
use hsdp_benches::steps::{GradientCount, StepsSize};
use hsdp_train::Failure;

use crate::steps::mesh;

/// Measures the CPU time of an operation against the number of ranks, and the time of a small
/// exchange of all ranks.
#[derive(Clone, Debug, Parser)]
#[command(name = "scale")]
pub(crate) struct Options {
    /// The numbers of ranks in a group, at most 256.
    #[arg(long, value_delimiter = ',', default_value = "4,8,16,32,64")]
    pub(crate) ranks: Vec<usize>,
    /// The numbers of members of an exchange by the control plane, which are processes; at most
    /// 256.
    #[arg(long, value_delimiter = ',', default_value = "4,16,64,256", value_parser = members)]
    pub(crate) members: Vec<usize>,
    /// The number of units; at most 10000.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    units: u32,
    /// The number of elements of a unit.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..))]
    numel: u32,
    /// The number of microbatches in a step; at most 65536.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    microbatches: u32,
    /// The number of steps, after one that is not measured, and of exchanges for each of them; at
    /// most 10000.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) repeat: u32,
    /// The file into which the times are drawn, as SVG.
    #[arg(long)]
    pub(crate) plot: Option<PathBuf>,
    /// Run a short version that only checks that the bench works: its numbers mean nothing.
    #[arg(long)]
    smoke: bool,
    /// The subject, in a process that the bench has started as one rank.
    #[arg(long, value_enum, hide = true)]
    pub(crate) as_rank: Option<Subject>,
    /// An option that `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The measurement in which a process takes part as a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Subject {
    /// The CPU time of operations by NCCL.
    Operations,
    /// The time of exchanges by the control plane.
    Exchanges,
}

impl Options {
    /// Checks that the ranks may be threads.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.ranks.iter().try_for_each(|ranks| check_threads(mesh(*ranks)?))
    }

    /// The options, with small sizes for `--smoke`.
    pub(crate) fn scaled(self) -> Self {
        if !self.smoke {
            return self;
        }
        Self { ranks: vec![2, 3], members: vec![2, 3], numel: 64, repeat: 2, ..self }
    }

    pub(crate) fn size(&self) -> StepsSize {
        let Self { units, numel, microbatches, .. } = *self;
        StepsSize { units, numel, microbatches, gradients: GradientCount::OneForAll }
    }

    /// The command line of a process that measures the same as a rank.
    #[cfg(feature = "nccl")]
    pub(crate) fn of_rank(&self, subject: Subject) -> Vec<String> {
        let subject = subject.to_possible_value().expect("it has a name").get_name().to_owned();
        let numbers = [
            ("--units", self.units),
            ("--numel", self.numel),
            ("--microbatches", self.microbatches),
            ("--repeat", self.repeat),
        ];
        let numbers = numbers.map(|(name, value)| [name.to_owned(), value.to_string()]);
        numbers.into_iter().flatten().chain(["--as-rank".to_owned(), subject]).collect()
    }
}

fn members(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (2..=256).contains(number));
    number.ok_or_else(|| format!("`{text}` is not a number of members from 2 to 256"))
}
