//! The options of a run that do not depend on its model.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hsdp::testing::Fault;
use hsdp::{Accumulation, DType, Mesh, Offload, Placement};
use hsdp_program::number::{count, seconds};
use hsdp_program::threads;

use super::failure::Failure;
use super::size;

/// The most units that are gathered ahead: no model has more.
pub(crate) const MAX_UNITS: usize = 10_000;
/// The most microbatches of a step: its bytes fit 64 bits.
pub(crate) const MAX_MICROBATCHES: usize = 1 << 16;
/// The most steps. Each leaves a record in memory for the report, so memory may allow less.
pub(crate) const MAX_STEPS: usize = 1_000_000_000;

/// How a run is spread, and where its files are.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunOptions {
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
    #[arg(long, value_name = "COUNT", default_value_t = size::MICROBATCHES, value_parser = count::<1, { MAX_MICROBATCHES }>)]
    pub(crate) microbatches: usize,

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
    #[arg(long, value_name = "UNITS", default_value_t = 1, value_parser = count::<0, { MAX_UNITS }>)]
    pub(crate) prefetch: usize,

    /// Seconds that a rank waits for other ranks before the run fails
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = seconds)]
    pub(crate) deadline: f64,

    /// Fault to inject, such as "rank 1, step 3, unit 2, reduce: freeze"; repeat the option for more; none by default
    #[arg(long = "fault", value_name = "FAULT")]
    pub(crate) faults: Vec<Fault>,

    /// Save a checkpoint in DIR/checkpoints after every STEPS steps, at the end, and on SIGINT or SIGTERM; off by default
    #[arg(long, value_name = "STEPS", value_parser = count::<1, { MAX_STEPS }>, requires = "out")]
    pub(crate) save_every: Option<usize>,

    /// Write norms of each parameter into metrics.jsonl in every STEPS-th step (of gradients, of parameters, and of updates over
    /// parameters), and draw the latter into norms.svg; off by default
    #[arg(long, value_name = "STEPS", value_parser = count::<1, { MAX_STEPS }>, requires = "out")]
    pub(crate) norms_every: Option<usize>,

    /// Resume from the newest checkpoint in DIR/checkpoints, if there is one; the mesh may differ; off by default
    #[arg(long, requires = "out")]
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

impl RunOptions {
    /// Checks the mesh, and lets the device know of the offloaded part.
    pub(crate) fn checked(self) -> Result<Self, Failure> {
        self.check_mesh()?;
        let device = self.device.offloading(self.offload);
        let device = device.map_err(|problem| Failure::input(format!("--offload: {problem}")))?;
        Ok(Self { device, ..self })
    }

    fn check_mesh(&self) -> Result<(), Failure> {
        match self.comm {
            Comm::Threads => threads::check(self.mesh.world_size(), threads::IN_EXAMPLES)
                .map_err(|problem| Failure::Input(format!("mesh {} has {problem}", self.mesh))),
            Comm::Mpi | Comm::Nccl => Ok(()),
        }
    }

    /// The same options with the device of this process: the processes of one machine get its devices in turn.
    pub(crate) fn of_process(&self) -> Result<Self, Failure> {
        let device = match self.comm {
            Comm::Threads => self.device,
            Comm::Mpi | Comm::Nccl => super::device::of_process(self.device)?,
        };
        Ok(Self { device, ..self.clone() })
    }

    /// The options without the number of a rank's device, which may differ between ranks.
    pub(crate) fn alike(&self) -> Self {
        Self { device: Placement::Host, ..self.clone() }
    }

    /// The ranks that are threads of this process.
    pub(crate) fn ranks_here(&self) -> usize {
        if self.comm == Comm::Threads { self.mesh.world_size() } else { 1 }
    }
}
