//! What is measured.

use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::case::{Bus, Collective};
use crate::{general, units};
use hsdp_benches::size::{Size, duration};

/// Elements at a latency's size: two of f32.
const SMALLEST: Size = Size(8);

/// Measures the collectives of the local flavour, by size and ranks. Ranks are threads.
#[derive(Debug, Parser)]
#[command(name = "collectives")]
pub(crate) struct Options {
    /// Numbers of ranks.
    #[arg(long, default_value = "2,4", value_delimiter = ',', value_parser = ranks)]
    pub(crate) ranks: Vec<usize>,
    /// The least size after 8 bytes, which is always measured: of the larger of a rank's two buffers.
    #[arg(long, default_value = "1KiB")]
    from: Size,
    /// The greatest size.
    #[arg(long, default_value = "16MiB")]
    to: Size,
    /// From one size to the next.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    factor: u32,
    /// Which collectives, by name; all if none is named.
    #[arg(long, value_delimiter = ',', value_parser = name)]
    pub(crate) only: Vec<&'static str>,
    /// Rows of calls that are timed.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) samples: u32,
    /// How long a row of calls takes; that of five calls, if they take longer.
    #[arg(long, default_value = "10ms", value_parser = duration)]
    pub(crate) each: Duration,
    /// What is printed.
    #[arg(long, value_enum, default_value = "table")]
    pub(crate) format: Format,
    /// What `cargo bench` says to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// A line each for programs: name, ranks, bytes, least and median in seconds.
    Lines,
}

impl Options {
    /// The sizes at which a collective is measured.
    pub(crate) fn sizes_of(&self, collective: &Collective) -> Vec<Size> {
        if collective.bus == Bus::Empty {
            return vec![SMALLEST];
        }
        let next = |size: &Size| size.0.checked_mul(self.factor as usize).map(Size);
        let sizes = std::iter::successors(Some(self.from), next);
        let greater = sizes.take_while(|size| *size <= self.to).filter(|size| *size > SMALLEST);
        std::iter::once(SMALLEST).chain(greater).collect()
    }
}

fn ranks(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=64).contains(number));
    number.ok_or_else(|| format!("`{text}` is no number of ranks: 1 to 64"))
}

fn name(text: &str) -> Result<&'static str, String> {
    let all = || general::ALL.iter().chain(&units::ALL).map(|it| it.name);
    let known = || all().collect::<Vec<_>>().join(", ");
    all().find(|name| *name == text).ok_or_else(|| format!("`{text}` is none of {}", known()))
}
