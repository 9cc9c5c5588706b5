//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use hsdp::testing::Fault;
use hsdp::{Accumulation, DType, Mesh, Offload, Placement};
use hsdp_program::number::{count, positive, seconds};
use hsdp_program::{command_line, threads};

use super::failure::Failure;
use super::{bounds, size};

/// Trains a character-level GPT on a mesh of replicas x shards whose ranks are threads or processes
#[derive(Clone, Debug, Parser)]
#[command(name = "train_gpt", version)]
pub(crate) struct Options {
    /// UTF-8 text file to train on, of at most 256 MiB; by default the Markdown files of this repository
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,

    /// Mesh of replicas x shards, such as 2x2; the product is the number of ranks
    #[arg(long, value_name = "RxS", default_value = size::MESH)]
    pub(crate) mesh: Mesh,

    /// How the ranks run and communicate
    #[arg(long, value_name = "COMM", value_enum, default_value_t = Comm::Threads)]
    pub(crate) comm: Comm,

    /// Device on which the model is kept, reduced and updated: cpu, cuda or cuda:N (a build with --features cuda; with
    /// candle-cuda candle computes there too)
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: Placement,

    /// Part of a model on a GPU that is kept and updated in host memory: none, optimizer or all
    #[arg(long, value_name = "PART", default_value = "none")]
    pub(crate) offload: Offload,

    /// Number of microbatches in a step, on each rank; at most 65536
    #[arg(long, value_name = "COUNT", default_value_t = size::MICROBATCHES, value_parser = count::<1, { bounds::MAX_MICROBATCHES }>)]
    pub(crate) microbatches: usize,

    /// Number of sequences in a microbatch, as far as memory allows
    #[arg(long, value_name = "COUNT", default_value_t = size::BATCH, value_parser = count::<1, { bounds::MAX }>)]
    pub(crate) batch: usize,

    /// Number of steps, at most 1000000000; each step updates the parameters once
    #[arg(long, value_name = "COUNT", default_value_t = 300, value_parser = count::<1, { bounds::MAX_STEPS }>)]
    pub(crate) steps: usize,

    /// Dtype of gathered parameters and of the model's computation: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = DType::of_training)]
    pub(crate) param_dtype: DType,

    /// Dtype of gradients on the wire: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = DType::of_training)]
    pub(crate) reduce_dtype: DType,

    /// When gradients are communicated: reduce-scatter (scattered in each microbatch, all-reduced once a step), every (both in
    /// each microbatch) or local (both once a step)
    #[arg(long, value_name = "MODE", default_value = "reduce-scatter")]
    pub(crate) accumulation: Accumulation,

    /// Number of units that are gathered before they are needed, at most 10000
    #[arg(long, value_name = "UNITS", default_value_t = 1, value_parser = count::<0, { bounds::MAX_LAYERS }>)]
    pub(crate) prefetch: usize,

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
    #[arg(long, value_name = "RATE", default_value_t = 3e-3, value_parser = positive)]
    pub(crate) lr: f64,

    /// Seed of the initial parameters, the batches and the sample
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,

    /// Also train the model unsharded, and fail unless losses and gradients agree; off by default
    #[arg(long)]
    pub(crate) verify: bool,

    /// Seconds that a rank waits for other ranks before the run fails; ignored with --verify
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = seconds)]
    pub(crate) deadline: f64,

    /// Fault to inject, such as "rank 1, step 3, unit 2, reduce: freeze"; repeat the option for more; none by default
    #[arg(long = "fault", value_name = "FAULT")]
    pub(crate) faults: Vec<Fault>,

    /// Save a checkpoint in DIR/checkpoints after every STEPS steps, at the end, and on SIGINT or SIGTERM; off by default
    #[arg(long, value_name = "STEPS", value_parser = count::<1, { bounds::MAX_STEPS }>, requires = "out")]
    pub(crate) save_every: Option<usize>,

    /// Resume from the newest checkpoint in DIR/checkpoints, if there is one; the mesh may differ; off by default
    #[arg(long, requires = "out", conflicts_with = "verify")]
    pub(crate) resume: bool,

    /// Directory for loss.svg, metrics.jsonl, summary.json and trace.json (for ui.perfetto.dev), for warnings.jsonl if there
    /// are warnings, and for flight/ if the run fails; one run at a time writes to it, and holds the lock on run.lock in it; by
    /// default no file is written
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

/// How the ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Comm {
    /// Threads of this process.
    Threads,
    /// Processes that mpirun has started (needs a build with --features mpi).
    Mpi,
    /// Processes on GPUs that `hsdp launch --comm nccl` or torchrun has started (needs a build with --features nccl).
    Nccl,
}

impl Options {
    /// Reads the command line. `--help` and `--version` end the program here.
    pub(crate) fn read() -> Result<Self, Failure> {
        let options: Self = command_line::read()?;
        options.check_mesh()?;
        let device = options.device.offloading(options.offload);
        let device = device.map_err(|problem| Failure::input(format!("--offload: {problem}")))?;
        Ok(Self { device, ..options })
    }

    fn check_mesh(&self) -> Result<(), Failure> {
        match self.comm {
            Comm::Threads => threads::check(self.mesh.world_size(), threads::IN_EXAMPLES)
                .map_err(|problem| Failure::Input(format!("mesh {} has {problem}", self.mesh))),
            Comm::Mpi | Comm::Nccl => Ok(()),
        }
    }

    /// The options that must be equal on all ranks. The number of a rank's device and the path of its text may differ.
    pub(crate) fn shared(&self) -> String {
        let alike = Self { device: Placement::Host, data: None, ..self.clone() };
        format!("{alike:?} on {}", self.device)
    }

    /// Tokens of a microbatch on a rank.
    pub(crate) fn tokens(&self) -> u64 {
        (self.batch * self.context) as u64
    }
}
