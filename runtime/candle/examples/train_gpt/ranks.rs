//! What the ranks are: threads of this process, or processes under MPI.

#[cfg(feature = "mpi")]
use hsdp::mpi;
use hsdp::{RankFailure, World};

use super::failure::Failure;
use super::options::{Comm, Options};
use super::recipe;

/// What the ranks are.
#[derive(Debug)]
pub(crate) enum Ranks {
    /// Threads of this process, all of them.
    Threads,
    /// Processes, of which this is one.
    #[cfg(feature = "mpi")]
    Processes(mpi::Job),
}

impl Ranks {
    /// As the command line says. Processes wait for each other here.
    #[cfg(feature = "mpi")]
    pub(crate) fn of(options: &Options) -> Result<Self, Failure> {
        if options.comm == Comm::Threads {
            return Ok(Self::Threads);
        }
        let job = mpi::Job::join(recipe::world(options).deadline).map_err(Failure::training)?;
        let (mesh, processes) = (options.mesh, job.size());
        match (mesh.world_size() == processes, job.rank().index()) {
            (true, _) => Ok(Self::Processes(job)),
            (false, 0) => Err(Failure::Input(format!(
                "mesh {mesh} has {} ranks, and there are {processes} processes",
                mesh.world_size()
            ))),
            (false, _) => Err(Failure::Elsewhere),
        }
    }

    #[cfg(not(feature = "mpi"))]
    pub(crate) fn of(options: &Options) -> Result<Self, Failure> {
        match options.comm {
            Comm::Threads => Ok(Self::Threads),
            Comm::Mpi => Err(Failure::input("--comm mpi: build with --features mpi")),
        }
    }

    /// Whether this process has rank 0, which shows and keeps what happens.
    pub(crate) fn has_first(&self) -> bool {
        match self {
            Self::Threads => true,
            #[cfg(feature = "mpi")]
            Self::Processes(job) => job.rank().index() == 0,
        }
    }

    /// Runs the ranks of this process; what each of them returned.
    pub(crate) fn launch<T: Send>(
        &self,
        options: &Options,
        rank: impl Fn(World) -> T + Sync,
    ) -> Result<Vec<Result<T, RankFailure>>, Failure> {
        let (size, world) = (options.mesh.world_size(), recipe::world(options));
        match self {
            Self::Threads => Ok(hsdp::launch(size, world, rank)),
            #[cfg(feature = "mpi")]
            Self::Processes(job) => {
                let ended = job.launch(size, world, rank).map_err(Failure::training)?;
                Ok(ended.into_iter().collect())
            }
        }
    }
}
