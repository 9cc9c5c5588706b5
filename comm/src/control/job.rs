//! The processes of a job without MPI, and the worlds that they make.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use hsdp_control::{Bootstrap, ControlError, Joined};
use hsdp_sharding::Rank;

use super::member::ControlMember;
use super::transport::ControlTransport;
use crate::launch::run_one;
use crate::{Error, RankFailure, World, WorldOptions};

/// This process's place in a job that `hsdp launch` or torchrun has started. Makes worlds, one
/// after the other or several at once. When all handles of the job and all its worlds are dropped,
/// the process leaves the job and tells the others.
///
/// Messages go over the control plane, through the process of rank 0. Each takes a hundred
/// microseconds or more, and all ranks together get some hundred megabytes a second. That is enough
/// for agreements and descriptors. Large tensors belong on devices, where NCCL carries them
/// ([`World::connect_nccl`]), or into a job of MPI.
#[derive(Clone, Debug)]
pub struct Job {
    member: Arc<ControlMember>,
}

impl Job {
    /// Joins the job that the environment describes ([`Bootstrap::from_env`]). Rank 0 runs the
    /// coordinator.
    ///
    /// **Collective**: all processes of the job call it, within the deadline.
    ///
    /// # Errors
    /// [`RendezvousError::Incomplete`](hsdp_control::RendezvousError) if a process does not join in time; the errors of
    /// [`Bootstrap::from_env`] and [`Bootstrap::join`].
    pub fn from_env(deadline: Duration) -> Result<Self, ControlError> {
        let mut bootstrap = Bootstrap::from_env()?;
        bootstrap.options.deadlines.rendezvous = deadline;
        bootstrap.join().map(|joined| Self::of(joined, deadline))
    }

    /// The job of a process that has joined already. At the end the processes wait for each other,
    /// for at most `deadline`.
    #[must_use]
    pub fn of(joined: Joined, deadline: Duration) -> Self {
        Self { member: Arc::new(ControlMember::new(joined, deadline)) }
    }

    /// The number of this process.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.member.rank()
    }

    /// The number of processes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.member.size()
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
        let transport = Box::new(ControlTransport::new(Arc::clone(&self.member)));
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
