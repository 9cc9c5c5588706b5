//! The command line.

use candle_core::DType;
use clap::{Parser, ValueEnum};

use super::failure::Failure;

/// The most ranks that may run as threads of one process.
const MAX_RANKS: usize = 64;

/// Trains two towers by a contrastive loss, on ranks that are threads
#[derive(Clone, Debug, Parser)]
#[command(name = "contrastive", version)]
pub(crate) struct Options {
    /// Number of ranks; each has its own part of a batch
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = counted)]
    pub(crate) ranks: usize,

    /// Number of steps; each step updates the parameters once
    #[arg(long, value_name = "COUNT", default_value_t = 300, value_parser = counted)]
    pub(crate) steps: usize,

    /// Number of pairs in a batch, of all ranks together; a multiple of --ranks
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = counted)]
    pub(crate) batch: usize,

    /// Number of elements of the towers' hidden layer
    #[arg(long, value_name = "SIZE", default_value_t = 64, value_parser = counted)]
    pub(crate) width: usize,

    /// Seed of the data and of the initial parameters
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,

    /// Also train on one rank with the whole batch, and fail unless losses and parameters agree; off by default
    #[arg(long)]
    pub(crate) verify: bool,

    /// Dtype of the data, the parameters and the gradients
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub(crate) dtype: Float,
}

/// A dtype to train in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Float {
    F32,
    F64,
}

impl Float {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F64 => DType::F64,
        }
    }

    /// The distance from 1 to the next number.
    pub(crate) fn epsilon(self) -> f64 {
        match self {
            Self::F32 => f64::from(f32::EPSILON),
            Self::F64 => f64::EPSILON,
        }
    }
}

impl Options {
    /// Reads the command line. `--help` and `--version` end the program here.
    pub(crate) fn read() -> Result<Self, Failure> {
        let options = Self::try_parse().map_err(|error| {
            if !error.use_stderr() {
                error.exit();
            }
            // The first line is the error; the rest is advice and usage.
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            Failure::Input(line.strip_prefix("error: ").unwrap_or(line).to_owned())
        })?;
        options.check()?;
        Ok(options)
    }

    fn check(&self) -> Result<(), Failure> {
        let Self { ranks, batch, .. } = *self;
        if ranks > MAX_RANKS {
            let what = format!("{ranks} ranks: at most {MAX_RANKS} run as threads of one process");
            return Err(Failure::Input(what));
        }
        if !batch.is_multiple_of(ranks) {
            let what = format!("a batch of {batch} pairs cannot be shared evenly by {ranks} ranks");
            return Err(Failure::Input(what));
        }
        if batch < 2 {
            let what = "a batch of 1 pair has no other pair to compare with: at least 2".to_owned();
            return Err(Failure::Input(what));
        }
        Ok(())
    }

    /// Pairs of each rank.
    pub(crate) fn share(&self) -> usize {
        self.batch / self.ranks
    }
}

fn counted(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|count| *count > 0)
        .ok_or_else(|| "expected a whole number from 1".to_owned())
}
