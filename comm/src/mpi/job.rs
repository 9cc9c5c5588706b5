//! The processes of a job of MPI, and the worlds that they make.

use std::ffi::c_int;
use std::fmt::Display;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::error::MpiError;
use super::library::MpiLibrary;
use super::transport::MpiTransport;
use crate::engine::from_now;
use crate::launch::run_one;
use crate::{Error, RankFailure, World, WorldOptions};

/// Tags of worlds are below this: every library has as many, and this one.
pub(super) const TAGS: c_int = 32_767;

/// This process's place in a job of MPI, as `mpirun` or `srun` has started it. Makes worlds, one
/// after the other or several at once. When all handles of the job and all its worlds are dropped,
/// MPI is finalized, and cannot be initialized again.
#[derive(Clone, Debug)]
pub struct Job {
    library: Arc<MpiLibrary>,
}

impl Job {
    /// Initializes MPI in this process, unless the program has. A program that was started without
    /// `mpirun` is a job of one process.
    ///
    /// **Collective**: all processes of the job call it, within the deadline.
    ///
    /// # Errors
    /// [`MpiError::Late`] if a process does not call it in time; [`MpiError::Threads`] if MPI
    /// provides a thread level below `MPI_THREAD_SERIALIZED`; [`MpiError::ProgramThreads`] if the
    /// program has initialized MPI with a level below `MPI_THREAD_MULTIPLE`, since its own calls
    /// could run at the same time as those of a progress thread; [`MpiError::Finalized`];
    /// [`MpiError::Thread`]; [`MpiError::Call`] with the error of MPI.
    pub fn join(deadline: Duration) -> Result<Self, MpiError> {
        // MPI_Init_thread waits for all processes, and has no deadline: where some never come, its
        // thread is left behind.
        let (begun, begin) = crossbeam::channel::bounded(1);
        let init = move || drop(begun.send(MpiLibrary::join(deadline)));
        let thread = Builder::new().name("hsdp-mpi-init".to_owned()).spawn(init);
        thread.map_err(|error| MpiError::Thread { problem: error.to_string() })?;
        let late = MpiError::Late { call: "MPI_Init_thread", deadline };
        let library = begin.recv_deadline(from_now(deadline)).map_err(|_| late)??;
        Ok(Self { library })
    }

    /// The number of this process.
    #[must_use]
    pub fn rank(&self) -> Rank {
        Rank::new(self.library.rank)
    }

    /// The number of processes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.library.size
    }

    /// Makes a world of the first `size` processes, each of them a rank; `None` on the other
    /// processes.
    ///
    /// **Collective**: all processes of the job, also those beyond `size`, make the same worlds in
    /// the same order. They wait for each other, and compare sizes, versions, programs and options.
    ///
    /// # Errors
    /// [`SetupError::ConfigMismatch`](crate::SetupError) on all processes if these differ,
    /// [`SetupError::Incomplete`](crate::SetupError) if a process does not come within the deadline
    /// of the options, [`CallError::BadRank`](crate::CallError) if the job has fewer processes,
    /// [`WorldError::BadFault`](crate::WorldError) if the world cannot have a fault of the options.
    pub fn world(&self, size: usize, options: WorldOptions) -> Result<Option<World>, Error> {
        let tag = self.library.next_world() % TAGS;
        let transport = Box::new(MpiTransport::new(Arc::clone(&self.library), tag));
        World::of_first(size, self.rank(), self.size(), options, transport)
    }

    /// Makes a [world](Self::world) of the first `size` processes and runs this process's rank on
    /// this thread, as [`launch`](crate::launch) runs its ranks: an error or a panic ends the world
    /// for the others, which get its text, and if the world ended early, the rank writes its flight
    /// record. Returns the result of the rank; `None` on the other processes.
    ///
    /// **Collective**, as `world`.
    ///
    /// # Errors
    /// As `world`.
    pub fn launch<T, E: Display + From<RankFailure>>(
        &self,
        size: usize,
        options: WorldOptions,
        rank: impl FnOnce(World) -> Result<T, E>,
    ) -> Result<Option<Result<T, E>>, Error> {
        let world = self.world(size, options.clone())?;
        Ok(world.map(|world| run_one(world, &options, rank)))
    }
}
