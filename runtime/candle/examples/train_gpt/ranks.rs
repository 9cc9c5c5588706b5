//! How the ranks run: as threads of this process, or as processes under MPI or on GPUs.

#[cfg(any(feature = "mpi", feature = "nccl"))]
use hsdp::CommError;
#[cfg(feature = "nccl")]
use hsdp::control;
#[cfg(feature = "mpi")]
use hsdp::mpi;
use hsdp::prelude::*;
use hsdp::{Launched, RankFailure};

use super::failure::Failure;
use super::options::{Comm, Options};
use super::recipe;

/// How the ranks run.
#[derive(Debug)]
pub(crate) enum Ranks {
    /// Threads of this process, all of them.
    Threads,
    /// Processes under MPI, of which this is one.
    #[cfg(feature = "mpi")]
    Mpi(mpi::Job),
    /// Processes on GPUs that `hsdp launch` or torchrun has started, of which this is one.
    #[cfg(feature = "nccl")]
    Nccl(control::Job),
}

impl Ranks {
    /// Joins the ranks as the command line says. Processes wait for each other here.
    pub(crate) fn of(options: &Options) -> Result<Self, Failure> {
        recipe::world(options).check(options.mesh.world_size()).map_err(Failure::input)?;
        match options.comm {
            Comm::Threads => Ok(Self::Threads),
            Comm::Mpi => by_mpi(recipe::world(options)),
            Comm::Nccl => by_nccl(recipe::world(options)),
        }
    }

    /// Refuses a mesh that does not have as many ranks as there are processes. Where only some processes have such a mesh, all are told so
    /// with the sizes of both sides, since all compare them when they make a world.
    pub(crate) fn check(&self, options: &Options) -> Result<(), Failure> {
        let (mesh, (rank, processes)) = (options.mesh, self.place());
        if matches!(self, Self::Threads) || mesh.world_size() == processes {
            return Ok(());
        }
        // The others launch a world, too.
        match (self.launch(options, drop), rank) {
            (Err(differs @ Failure::Input(_)), _) => Err(differs),
            (_, 0) => Err(Failure::Input(format!(
                "mesh {mesh} has {} ranks, and there are {processes} processes",
                mesh.world_size()
            ))),
            _ => Err(Failure::Elsewhere),
        }
    }

    /// The index of this process, and the number of processes.
    fn place(&self) -> (usize, usize) {
        match self {
            Self::Threads => (0, 1),
            #[cfg(feature = "mpi")]
            Self::Mpi(job) => (job.rank().index(), job.size()),
            #[cfg(feature = "nccl")]
            Self::Nccl(job) => (job.rank().index(), job.size()),
        }
    }

    /// The rank of this process, if it is one of several.
    pub(crate) fn of_process(&self) -> Option<usize> {
        let (rank, processes) = self.place();
        (processes > 1).then_some(rank)
    }

    /// Whether this process has rank 0, which shows progress and writes the files.
    pub(crate) fn has_first(&self) -> bool {
        self.place().0 == 0
    }

    /// Runs the ranks of this process, and returns the result of each.
    pub(crate) fn launch<T: Send>(
        &self,
        options: &Options,
        rank: impl Fn(World) -> T + Sync,
    ) -> Result<Vec<Result<T, RankFailure>>, Failure> {
        let (size, world) = (options.mesh.world_size(), recipe::world(options));
        match self {
            Self::Threads => Ok(hsdp::launch(size, world, rank)),
            #[cfg(feature = "mpi")]
            Self::Mpi(job) => {
                let ended = job.launch(size, world, rank).map_err(no_world)?;
                Ok(ended.into_iter().collect())
            }
            #[cfg(feature = "nccl")]
            Self::Nccl(job) => {
                let ended = job.launch(size, world, rank).map_err(no_world)?;
                Ok(ended.into_iter().collect())
            }
        }
    }
}

/// The failure to make a world. Processes whose command lines differ are mistakes of the input.
#[cfg(any(feature = "mpi", feature = "nccl"))]
fn no_world(error: CommError) -> Failure {
    match error {
        CommError::ConfigMismatch { .. } => Failure::input(error),
        error => Failure::training(error),
    }
}

#[cfg(feature = "mpi")]
fn by_mpi(world: WorldOptions) -> Result<Ranks, Failure> {
    mpi::Job::join(world.deadline).map(Ranks::Mpi).map_err(Failure::training)
}

#[cfg(not(feature = "mpi"))]
fn by_mpi(_: WorldOptions) -> Result<Ranks, Failure> {
    Err(Failure::input("--comm mpi: build with --features mpi"))
}

#[cfg(feature = "nccl")]
fn by_nccl(world: WorldOptions) -> Result<Ranks, Failure> {
    use hsdp::control::ControlError;
    let joined = control::Job::from_env(world.deadline);
    joined.map(Ranks::Nccl).map_err(|error| match error {
        ControlError::Environment { .. } => Failure::input(format!("--comm nccl: {error}")),
        error => Failure::training(error),
    })
}

#[cfg(not(feature = "nccl"))]
fn by_nccl(_: WorldOptions) -> Result<Ranks, Failure> {
    Err(Failure::input("--comm nccl: build with --features nccl"))
}

/// The same failure, with the rank that a launcher has given to this process: the ranks have not joined yet.
pub(crate) fn named(failure: Failure) -> Failure {
    let launched = Launched::from_env().ok().flatten().filter(|launched| launched.size > 1);
    match (failure, launched) {
        (Failure::Input(what), Some(launched)) => {
            Failure::Input(format!("rank {}: {what}", launched.rank))
        }
        (failure, _) => failure,
    }
}
