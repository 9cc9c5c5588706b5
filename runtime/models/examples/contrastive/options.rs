//! The command line.

use candle_core::DType;
use clap::{Parser, ValueEnum};
use hsdp_train::memory::{Limit, Need, product};
use hsdp_train::number::count;
use hsdp_train::{Failure, command_line, threads};

use super::data::{LATENT, VIEW};
use super::model::EMBEDDING;
use super::report::Record;

/// The largest batch and width: their products fit 64 bits. The memory of the process allows less.
const MAX: usize = 1 << 24;

/// The most steps.
const MAX_STEPS: usize = 1_000_000_000;

/// Tensors that a step holds at its peak, in the backward or in the update, measured with one large size each: of the size of a
/// hidden layer, of all similarities in one direction, and of the parameters.
const HIDDEN: usize = 20;
const LOGITS: usize = 18;
const PARAMETERS: usize = 6;

/// Trains two towers by a contrastive loss, on ranks that are threads
#[derive(Clone, Debug, Parser)]
#[command(name = "contrastive", version)]
pub(crate) struct Options {
    /// Number of ranks, at most 64; each has its own part of a batch
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = count::<1, { usize::MAX }>)]
    pub(crate) ranks: usize,

    /// Number of steps, at most 1000000000; each step updates the parameters once
    #[arg(long, value_name = "COUNT", default_value_t = 300, value_parser = count::<1, MAX_STEPS>)]
    pub(crate) steps: usize,

    /// Number of pairs in a batch, of all ranks together, as far as memory allows; a multiple of --ranks
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = count::<1, MAX>)]
    pub(crate) batch: usize,

    /// Number of elements of the towers' hidden layer, as far as memory allows
    #[arg(long, value_name = "SIZE", default_value_t = 64, value_parser = count::<1, MAX>)]
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
        let options: Self = command_line::read()?;
        options.check()?;
        Ok(options)
    }

    fn check(&self) -> Result<(), Failure> {
        let Self { ranks, batch, .. } = *self;
        threads::check(ranks, threads::IN_EXAMPLES).map_err(Failure::Input)?;
        if !batch.is_multiple_of(ranks) {
            let what = format!("a batch of {batch} pairs cannot be shared evenly by {ranks} ranks");
            return Err(Failure::Input(what));
        }
        if batch < 2 {
            let what = "a batch of 1 pair has no other pair to compare with: at least 2".to_owned();
            return Err(Failure::Input(what));
        }
        Ok(self.need().check(Limit::of_process())?)
    }

    /// The memory of a step of all ranks. Each rank makes the whole batch of views.
    fn need(&self) -> Need {
        let Self { ranks, batch, width, steps, .. } = *self;
        let (share, size) = (self.share(), self.dtype.dtype().size_in_bytes());
        // With --verify rank 0 also compares all pairs with all pairs.
        let compared = if self.verify { batch.saturating_add(batch) } else { batch };
        let layers = 2 * (VIEW + EMBEDDING);
        Need::default()
            .with("a record of each step", product(&[steps, size_of::<Record>()]))
            .with(
                "the batch of each rank",
                product(&[ranks, batch, LATENT + 2 * VIEW, size_of::<f64>()]),
            )
            .with("the hidden layers", product(&[ranks, share, width, HIDDEN, size]))
            .with("the comparison of all pairs", product(&[compared, batch, LOGITS, size]))
            .with("the parameters of each rank", product(&[ranks, layers, width, PARAMETERS, size]))
    }

    /// Pairs of each rank.
    pub(crate) fn share(&self) -> usize {
        self.batch / self.ranks
    }
}
