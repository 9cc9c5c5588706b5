//! The command line.

use std::fmt;

use clap::{Parser, ValueEnum};
use hsdp::{
    Accumulation, DType, FullCopies, Mesh, ModelOptions, Objective, Offload, Placement, Precision,
};
use hsdp_benches::program::check_threads;
use hsdp_benches::steps::{GradientCount, StepsSize};
use hsdp_train::Failure;
use hsdp_train::memory::Limit;

use crate::bare::Bare;

/// Measures the step of a sharded model without its arithmetic, beside a bare loop over the same
/// bytes.
#[derive(Debug, Parser)]
#[command(name = "accumulation")]
pub(crate) struct Options {
    /// The ranks: threads of this process, the processes that mpirun has started (needs a build
    /// with --features mpi), or threads that share the first CUDA device and go by NCCL (needs
    /// --features nccl).
    #[arg(long, value_enum, default_value_t = Comm::Local)]
    pub(crate) comm: Comm,
    /// The mesh, replicate x shard.
    #[arg(long, default_value = "2x2")]
    pub(crate) mesh: Mesh,
    /// The number of units, all of one size; at most 10000.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) units: u32,
    /// The number of elements of a unit.
    #[arg(long, default_value_t = 2_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) numel: u32,
    /// The number of microbatches in a step; at most 65536.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) microbatches: u32,
    /// The dtype of gathered parameters and of gradients: f32, bf16 or f16.
    #[arg(long, default_value = "f32", value_parser = DType::of_training)]
    pub(crate) param_dtype: DType,
    /// The dtype of gradients on the wire: f32, bf16 or f16.
    #[arg(long, default_value = "f32", value_parser = DType::of_training)]
    pub(crate) reduce_dtype: DType,
    /// The accumulation mode: reduce-scatter, every or local.
    #[arg(long, default_value = "reduce-scatter")]
    pub(crate) mode: Accumulation,
    /// The full copies of a gathered unit: per-rank or per-process.
    #[arg(long, default_value = "per-rank")]
    pub(crate) full_copies: FullCopies,
    /// The number of units that are gathered ahead.
    #[arg(long, default_value_t = 1)]
    pub(crate) prefetch: usize,
    /// The number of measured steps, after one that is not measured; at most 1000000.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) repeat: u32,
    /// An option that `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The kind of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Comm {
    /// Threads of this process.
    Local,
    /// Processes under MPI.
    Mpi,
    /// Threads of this process that share a CUDA device, and go by NCCL.
    Nccl,
}

impl fmt::Display for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
        })
    }
}

impl Options {
    pub(crate) fn ranks(&self) -> usize {
        self.mesh.world_size()
    }

    /// Checks that the memory of all ranks, and of the bare loop beside them, is within that of
    /// this process, where they lie there.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.comm == Comm::Mpi {
            return Ok(());
        }
        check_threads(self.mesh)?;
        if self.comm == Comm::Nccl {
            let is_built = cfg!(feature = "nccl");
            let missing = || Failure::input("--comm nccl: build with --features nccl");
            return is_built.then_some(()).ok_or_else(missing);
        }
        let need = self.size().need(&self.of_model())?;
        let of_loop = if Bare::serves(self) { need.bytes() } else { 0 };
        Ok(need.with("the bare loop", of_loop).check(Limit::of_process())?)
    }

    pub(crate) fn numel(&self) -> usize {
        self.numel as usize
    }

    pub(crate) fn size(&self) -> StepsSize {
        let Self { units, numel, microbatches, .. } = *self;
        StepsSize { units, numel, microbatches, gradients: GradientCount::OfEachUnit }
    }

    fn placement(&self) -> Placement {
        match self.comm {
            Comm::Nccl => Placement::Cuda { ordinal: 0, offload: Offload::None },
            Comm::Local | Comm::Mpi => Placement::Host,
        }
    }

    pub(crate) fn of_model(&self) -> ModelOptions {
        let parameters = self.param_dtype;
        let wire = self.reduce_dtype;
        ModelOptions {
            precision: Precision { parameters, wire, ..Precision::default() },
            accumulation: self.mode,
            prefetch: self.prefetch,
            full_copies: self.full_copies,
            placement: self.placement(),
            // As in FSDP2: losses have no weights, and the objective is the mean over ranks.
            objective: Objective::RankMean,
            ..ModelOptions::on(self.mesh)
        }
    }
}
