//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use hsdp_benches::size::{Size, duration};

/// Measures the kernels of a CUDA device against a copy, and the time that the host needs to issue
/// them.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpu_kernels")]
pub(crate) struct Options {
    /// The sizes, in bytes of f32: 16MiB means 4 Mi elements, in every dtype.
    #[arg(long, default_value = "1MiB,16MiB,256MiB", value_delimiter = ',', value_parser = size)]
    pub(crate) sizes: Vec<Size>,
    /// The beginnings of the names of the kernels to measure (`issue` is one of the names); all by
    /// default.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// The number of timed rows of launches; at most 1000000.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) samples: u32,
    /// The duration of a row, which has 3 to 100 launches.
    #[arg(long, default_value = "2ms", value_parser = duration)]
    pub(crate) each: Duration,
    /// The ordinal of the device, as the driver counts.
    #[arg(long, default_value_t = 0)]
    pub(crate) device: usize,
    /// The file for the time of each row, in seconds a launch, as CSV.
    #[arg(long)]
    pub(crate) csv: Option<PathBuf>,
    /// Run a short version that only checks that the bench works: its numbers mean nothing.
    #[arg(long)]
    pub(crate) smoke: bool,
    /// An option that `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The least size: there must be some elements for each of a hundred parameters.
const LEAST: Size = Size(64 << 10);

impl Options {
    /// The options, with small sizes for `--smoke`.
    pub(crate) fn scaled(self) -> Self {
        if !self.smoke {
            return self;
        }
        Self { sizes: vec![LEAST], samples: 2, each: Duration::from_micros(200), ..self }
    }

    pub(crate) fn measures(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|begin| name.starts_with(begin.as_str()))
    }
}

fn size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse()?;
    if size < LEAST {
        return Err(format!("{size} are too few: {LEAST} is the least"));
    }
    Ok(size)
}
