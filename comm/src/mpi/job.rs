//! The processes of a job of MPI, and the worlds that they make.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::error::MpiError;
use super::library::Library;
use super::transport::MpiTransport;
use crate::launch::run_one;
use crate::local::from_now;
use crate::{Error, RankFailure, World, WorldOptions};

/// Tags of worlds are below this: every library has as many, and this one.
pub(super) const TAGS: c_int = 32_767;

/// This process's place in a job of MPI: what `mpirun` or `srun` has started. Worlds are made of it, one after the other or
/// several at once. When it and all its worlds are gone, MPI is finalized, and cannot be begun again.
#[derive(Clone)]
pub struct Job {
    library: Arc<Library>,
}

impl Job {
    /// Begins MPI in this process, unless the program has; a program that was started without `mpirun` is a job of one process.
    ///
    /// **Collective**: all processes of the job do so, within the deadline.
    ///
    /// # Errors
    /// [`MpiError::Late`] if not all come; [`MpiError::Threads`] if the library, or the program that began it, has it serve one
    /// thread alone; [`MpiError::Finalized`]; [`MpiError::Call`] with what MPI says.
    pub fn join(deadline: Duration) -> Result<Self, MpiError> {
        // MPI_Init_thread waits for all processes, and has no deadline: where some never come, its thread is left behind.
        let (begun, begin) = crossbeam::channel::bounded(1);
        let init = move || drop(begun.send(Library::join(deadline)));
        let thread = Builder::new().name("hsdp-mpi-init".to_owned()).spawn(init);
        thread.map_err(|error| MpiError::Thread { problem: error.to_string() })?;
        let late = MpiError::Late { call: "MPI_Init_thread", deadline };
        let library = begin.recv_deadline(from_now(deadline)).map_err(|_| late)??;
        Ok(Self { library })
    }

    /// Which process this is.
    #[must_use]
    pub fn rank(&self) -> Rank {
        Rank::new(self.library.rank())
    }

    /// How many processes there are.
    #[must_use]
    pub fn size(&self) -> usize {
        self.library.size()
    }

    /// A world of the first `size` processes, each a rank; `None` on those that are not among them.
    ///
    /// **Collective**: all processes of the job, also those that are not among them, make the same worlds in the same order. The
    /// first `size` wait for each other, and compare versions, programs and options.
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] on all ranks, [`Error::Incomplete`] if some do not come within the deadline of the options,
    /// [`Error::BadRank`] if the job has fewer processes.
    pub fn world(&self, size: usize, options: WorldOptions) -> Result<Option<World>, Error> {
        let tag = self.library.next_world() % TAGS;
        let transport = Box::new(MpiTransport::new(Arc::clone(&self.library), tag));
        World::of_first(size, (self.rank(), self.size()), options, transport)
    }
}

impl Job {
    /// Runs a rank of a [world](Self::world) of the first `size` processes on this thread, as [`launch`](crate::launch) runs each of
    /// its own: a panic ends the world for the others, and if the world ended early, the rank leaves its flight record. What the
    /// rank returned; `None` on processes that are not among the first.
    ///
    /// **Collective**, as `world`.
    ///
    /// # Errors
    /// As `world`.
    pub fn launch<T>(
        &self,
        size: usize,
        options: WorldOptions,
        rank: impl FnOnce(World) -> T,
    ) -> Result<Option<Result<T, RankFailure>>, Error> {
        let world = self.world(size, options.clone())?;
        Ok(world.map(|world| run_one(world, &options, rank)))
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("rank", &self.rank()).field("size", &self.size()).finish()
    }
}
