//! How the ranks run: as threads of this process, or as processes under MPI or on GPUs.

use std::time::Duration;

#[cfg(any(feature = "mpi", feature = "nccl"))]
use hsdp::CommError;
#[cfg(feature = "nccl")]
use hsdp::control;
#[cfg(feature = "mpi")]
use hsdp::mpi;
use hsdp::prelude::*;
use hsdp::{Launched, RankFailure};

use super::failure::Failure;
use super::options::{Comm, RunOptions};

/// How the ranks of a mesh run.
#[derive(Debug)]
pub(crate) struct Ranks {
    mesh: Mesh,
    world: WorldOptions,
    joined: Joined,
}

/// The ranks that have joined.
#[derive(Debug)]
enum Joined {
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
    pub(crate) fn of(options: &RunOptions, world: WorldOptions) -> Result<Self, Failure> {
        world.check(options.mesh.world_size()).map_err(Failure::input)?;
        let joined = match options.comm {
            Comm::Threads => Joined::Threads,
            Comm::Mpi => by_mpi(world.deadline)?,
            Comm::Nccl => by_nccl(world.deadline)?,
        };
        Ok(Self { mesh: options.mesh, world, joined })
    }

    /// Refuses a mesh that does not have as many ranks as there are processes. Where only some processes have such a mesh, all are told so
    /// with the sizes of both sides, since all compare them when they make a world.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let (mesh, (rank, processes)) = (self.mesh, self.place());
        if matches!(self.joined, Joined::Threads) || mesh.world_size() == processes {
            return Ok(());
        }
        // The others launch a world, too.
        match (self.launch(drop), rank) {
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
        match &self.joined {
            Joined::Threads => (0, 1),
            #[cfg(feature = "mpi")]
            Joined::Mpi(job) => (job.rank().index(), job.size()),
            #[cfg(feature = "nccl")]
            Joined::Nccl(job) => (job.rank().index(), job.size()),
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
        rank: impl Fn(World) -> T + Sync,
    ) -> Result<Vec<Result<T, RankFailure>>, Failure> {
        let (size, world) = (self.mesh.world_size(), self.world.clone());
        match &self.joined {
            Joined::Threads => Ok(hsdp::launch(size, world, rank)),
            #[cfg(feature = "mpi")]
            Joined::Mpi(job) => {
                let ended = job.launch(size, world, rank).map_err(no_world)?;
                Ok(ended.into_iter().collect())
            }
            #[cfg(feature = "nccl")]
            Joined::Nccl(job) => {
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
fn by_mpi(deadline: Duration) -> Result<Joined, Failure> {
    mpi::Job::join(deadline).map(Joined::Mpi).map_err(Failure::training)
}

#[cfg(not(feature = "mpi"))]
fn by_mpi(_: Duration) -> Result<Joined, Failure> {
    Err(Failure::input("--comm mpi: build with --features mpi"))
}

#[cfg(feature = "nccl")]
fn by_nccl(deadline: Duration) -> Result<Joined, Failure> {
    use hsdp::control::ControlError;
    let joined = control::Job::from_env(deadline);
    joined.map(Joined::Nccl).map_err(|error| match error {
        ControlError::Environment { .. } => Failure::input(format!("--comm nccl: {error}")),
        error => Failure::training(error),
    })
}

#[cfg(not(feature = "nccl"))]
fn by_nccl(_: Duration) -> Result<Joined, Failure> {
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
