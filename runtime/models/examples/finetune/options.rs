//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use hsdp_models::decoder::DecoderConfig;
use hsdp_train::command_line;
use hsdp_train::number::{count, learning_rate};

use super::shared::failure::Failure;
use super::shared::options::{MAX_STEPS, RunOptions};
use super::shared::size;

/// The largest size of a model, a batch or a context.
const MAX: usize = DecoderConfig::MAX_SIZE;

/// Trains a decoder on a mesh of replicas x shards whose ranks are threads or processes
#[derive(Clone, Debug, Parser)]
#[command(name = "finetune", version)]
pub(crate) struct Options {
    /// Folder of transformers: config.json, whose model_type chooses the family, weights in one or
    /// several safetensors files (f32, bf16 or f16), and tokenizer.json for --data; by default a
    /// small model with random weights trains on characters
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,

    /// Safetensors file with input_ids (u32) and labels (i64, shifted, -100 where one does not count), [steps, sequences, length];
    /// perhaps eval_input_ids and eval_labels, [sequences, length]. The sequences of a step are dealt in blocks: the first to
    /// the first microbatch of rank 0, the next to its second one, and so on
    #[arg(long, value_name = "FILE", requires = "model", conflicts_with = "data")]
    pub(crate) batches: Option<PathBuf>,

    /// UTF-8 text file to train on, of at most 256 MiB, of which the last tenth is held out; by default the Markdown files of this
    /// repository
    #[arg(long, value_name = "TEXT")]
    pub(crate) data: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) run: RunOptions,

    /// Number of steps, at most 1000000000; by default all of --batches, or 1000
    #[arg(long, value_name = "COUNT", value_parser = count::<1, { MAX_STEPS }>)]
    pub(crate) steps: Option<usize>,

    /// Optimizer: muon updates the matrices of layers, and leaves the rest to AdamW
    #[arg(long, value_enum, default_value_t = Optimizer::Adamw)]
    pub(crate) optimizer: Optimizer,

    /// Learning rate, which stays as it is: 2e-3 by default, 2e-4 for lion, 1e-2 for adafactor; matrices that muon updates have five
    /// times this rate
    #[arg(long, value_name = "RATE", value_parser = learning_rate)]
    pub(crate) lr: Option<f64>,

    /// Keep a moving average of the weights, of which each step keeps this fraction; it is evaluated at the end, and exported in place of
    /// the weights; off by default
    #[arg(long, value_name = "DECAY", value_parser = fraction)]
    pub(crate) ema: Option<f64>,

    /// Run each block again in the backward instead of keeping its tensors; off by default
    #[arg(long)]
    pub(crate) recompute: bool,

    /// Train adapters of this rank on the projections of attention, and freeze the model; off by default
    #[arg(long, value_name = "RANK", value_parser = count::<1, { MAX }>)]
    pub(crate) lora: Option<usize>,

    /// Number of sequences of a text in a microbatch
    #[arg(long, value_name = "COUNT", default_value_t = size::BATCH, value_parser = count::<1, { MAX }>, conflicts_with = "batches")]
    pub(crate) batch: usize,

    /// Number of tokens in a sequence of a text
    #[arg(long, value_name = "LENGTH", default_value_t = size::CONTEXT, value_parser = count::<1, { MAX }>, conflicts_with = "batches")]
    pub(crate) context: usize,

    /// Seed of random weights, of adapters and of the choice of sequences in a text
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,

    /// Folder for the trained model, which transformers and candle read: config.json,
    /// model.safetensors in f32, and the other files of --model; with --lora the model as it was (on
    /// the CPU rounded to --param-dtype, if that has 16 bits), adapters.safetensors, and the folder
    /// peft with the adapters as PEFT reads them; files of these names are replaced
    #[arg(long, value_name = "DIR")]
    pub(crate) export: Option<PathBuf>,
}

/// An optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Optimizer {
    Adamw,
    Muon,
    Lion,
    Adafactor,
    Adamw8bit,
}

impl Optimizer {
    /// Its name on the command line.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("no optimizer is hidden");
        value.get_name().to_owned()
    }
}

/// A number from 0 to below 1.
fn fraction(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..1.0).contains(number));
    number.ok_or_else(|| "it must be a number from 0 to below 1".to_owned())
}

impl Options {
    /// Reads the command line. `--help` and `--version` end the program here.
    pub(crate) fn read() -> Result<Self, Failure> {
        let options: Self = command_line::read()?;
        if options.model.is_some() && options.batches.is_none() && options.data.is_none() {
            return Err(Failure::input("--model needs --batches or --data"));
        }
        Ok(Self { run: options.run.checked()?, ..options })
    }

    /// The options that must be equal on all ranks. The number of a rank's device and the paths of files may differ.
    pub(crate) fn shared(&self) -> String {
        // Whether there is such a path decides what a rank does.
        let given = |path: &Option<PathBuf>| path.as_ref().map(|_| PathBuf::new());
        let alike = Self {
            model: given(&self.model),
            batches: given(&self.batches),
            data: given(&self.data),
            export: given(&self.export),
            run: self.run.alike(),
            ..self.clone()
        };
        format!("{alike:?} on {}", self.run.device)
    }
}
