//! The command line.

use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::case::{Bus, Collective};
use crate::{general, units};
use hsdp_benches::size::{Size, duration};
use hsdp_train::memory::{Limit, Need, TooMuch, product};

/// The size at which latency is measured: two elements of f32.
const SMALLEST: Size = Size(8);

/// Measures the collectives of ranks that are threads, by size and ranks.
#[derive(Debug, Parser)]
#[command(name = "collectives")]
pub(crate) struct Options {
    /// Numbers of ranks, at most 64.
    #[arg(long, default_value = "2,4", value_delimiter = ',', value_parser = ranks)]
    pub(crate) ranks: Vec<usize>,
    /// The smallest size, of the larger of a rank's two buffers. 8 bytes are always measured, too.
    #[arg(long, default_value = "1KiB")]
    from: Size,
    /// The largest size, as far as memory allows.
    #[arg(long, default_value = "16MiB")]
    to: Size,
    /// The factor from one size to the next.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    factor: u32,
    /// The names of the collectives to measure; all by default.
    #[arg(long, value_delimiter = ',', value_parser = name)]
    pub(crate) only: Vec<&'static str>,
    /// The number of timed rows of calls, at most 1000000.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) samples: u32,
    /// The duration of a row of calls, which has at least five calls.
    #[arg(long, default_value = "10ms", value_parser = duration)]
    pub(crate) each: Duration,
    /// The format of the output.
    #[arg(long, value_enum, default_value = "table")]
    pub(crate) format: Format,
    /// An option that `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// For programs, one line for each collective and size: name, ranks, bytes, least and median in
    /// seconds.
    Lines,
}

impl Options {
    /// Checks that the two buffers of all ranks are within the memory of this process.
    pub(crate) fn check(&self) -> Result<(), TooMuch> {
        let most = self.ranks.iter().max().copied().unwrap_or(1);
        let buffers = product(&[most, 2, self.to.0]);
        Need::default()
            .with(format!("the buffers of {most} ranks"), buffers)
            .check(Limit::of_process())
    }

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
    number.ok_or_else(|| format!("`{text}` is not a number of ranks from 1 to 64"))
}

fn name(text: &str) -> Result<&'static str, String> {
    let all = || general::ALL.iter().chain(&units::ALL).map(|it| it.name);
    let known = || all().collect::<Vec<_>>().join(", ");
    all().find(|name| *name == text).ok_or_else(|| format!("`{text}` is none of {}", known()))
}
