//! The command line.

use std::path::PathBuf;

use clap::Parser;
use hsdp_train::command_line;
use hsdp_train::number::{count, learning_rate};

use super::bounds;
use super::shared::failure::Failure;
use super::shared::options::{MAX_STEPS, RunOptions};
use super::shared::size;

/// Trains a character-level GPT on a mesh of replicas x shards whose ranks are threads or processes
#[derive(Clone, Debug, Parser)]
#[command(name = "train_gpt", version)]
pub(crate) struct Options {
    /// UTF-8 text file to train on, of at most 256 MiB; by default the Markdown files of this repository
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) run: RunOptions,

    /// Number of sequences in a microbatch, as far as memory allows
    #[arg(long, value_name = "COUNT", default_value_t = size::BATCH, value_parser = count::<1, { bounds::MAX }>)]
    pub(crate) batch: usize,

    /// Number of steps, at most 1000000000; each step updates the parameters once
    #[arg(long, value_name = "COUNT", default_value_t = 300, value_parser = count::<1, { MAX_STEPS }>)]
    pub(crate) steps: usize,

    /// Number of transformer blocks, at most 10000
    #[arg(long, value_name = "COUNT", default_value_t = size::LAYERS, value_parser = count::<1, { bounds::MAX_LAYERS }>)]
    pub(crate) layers: usize,

    /// Number of elements of the residual stream, as far as memory allows; a multiple of --heads
    #[arg(long, value_name = "SIZE", default_value_t = size::WIDTH, value_parser = count::<1, { bounds::MAX }>)]
    pub(crate) width: usize,

    /// Number of attention heads in a block; it divides --width
    #[arg(long, value_name = "COUNT", default_value_t = size::HEADS, value_parser = count::<1, { bounds::MAX }>)]
    pub(crate) heads: usize,

    /// Number of characters in a sequence, as far as memory allows; the text has at least one more
    #[arg(long, value_name = "LENGTH", default_value_t = size::CONTEXT, value_parser = count::<1, { bounds::MAX }>)]
    pub(crate) context: usize,

    /// Peak learning rate; it rises linearly over the first twentieth of the steps, then falls along a cosine to a tenth
    #[arg(long, value_name = "RATE", default_value_t = 3e-3, value_parser = learning_rate)]
    pub(crate) lr: f64,

    /// Seed of the initial parameters, the batches and the sample
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,

    /// Also train the model unsharded, and fail unless losses and gradients agree; the ranks wait for that without a deadline; off by default
    #[arg(long, conflicts_with = "resume")]
    pub(crate) verify: bool,
}

impl Options {
    /// Reads the command line. `--help` and `--version` end the program here.
    pub(crate) fn read() -> Result<Self, Failure> {
        let options: Self = command_line::read()?;
        Ok(Self { run: options.run.checked()?, ..options })
    }

    /// The options that must be equal on all ranks. The number of a rank's device and the path of its text may differ.
    pub(crate) fn shared(&self) -> String {
        let alike = Self { data: None, run: self.run.alike(), ..self.clone() };
        format!("{alike:?} on {}", self.run.device)
    }

    /// Tokens of a microbatch on a rank.
    pub(crate) fn tokens(&self) -> u64 {
        (self.batch * self.context) as u64
    }
}
