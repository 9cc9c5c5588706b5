//! What is measured.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use hsdp_benches::size::{Size, duration};

/// Measures the kernels of a CUDA device against a copy, and what it takes to issue them.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpu_kernels")]
pub(crate) struct Options {
    /// Sizes: of as many elements of f32.
    #[arg(long, default_value = "1MiB,16MiB,256MiB", value_delimiter = ',', value_parser = size)]
    pub(crate) sizes: Vec<Size>,
    /// Which kernels, by how their names begin (`issue` is one of them); all if none is named.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Rows of launches that are timed.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) samples: u32,
    /// How long a row takes, in up to 100 launches and no fewer than three.
    #[arg(long, default_value = "2ms", value_parser = duration)]
    pub(crate) each: Duration,
    /// Which of the driver's devices.
    #[arg(long, default_value_t = 0)]
    pub(crate) device: usize,
    /// A file for what every row took, in seconds a launch.
    #[arg(long)]
    pub(crate) csv: Option<PathBuf>,
    /// Little of everything, to see that it runs: the numbers mean nothing.
    #[arg(long)]
    pub(crate) smoke: bool,
    /// What `cargo bench` says to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The least size: there must be some elements for each of a hundred parameters.
const LEAST: Size = Size(64 << 10);

impl Options {
    /// The options, made small where only a look is wanted.
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
